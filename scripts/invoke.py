"""`kogpt2 ask` and `kogpt2 invoke`: send a prompt and print the answer."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from command.errors import Problem
from command.options import argument, option, seconds
from scripts.client.errors import NotReady
from scripts.client.options import Sampling, Target, request_body

RETRY_S = 2.0  # between two attempts while SageMaker loads the model


@dataclass(kw_only=True)
class Prompt(Target, Sampling):
    json: bool = option(False, "print the server's whole answer")
    dry_run: bool = option(False, "print the request, and do not send it")
    wait: float = option(
        "360",
        "how long to retry while SageMaker loads the model, seconds",
        parser=seconds,
        metavar="S",
    )


@dataclass(kw_only=True)
class Ask(Prompt):
    model: str = argument("the fine-tune")
    text: str | None = argument("the prompt (default: standard input)", None)
    stream: bool = option(True, "print the text while it is generated", "--stream/--no-stream")


@dataclass(kw_only=True)
class Invoke(Prompt):
    model: str | None = option(
        None, "the fine-tune, with or without .tar.gz (default: the endpoint's only one)"
    )
    text: str | None = option(None, "the prompt (default: standard input)")
    stream: bool = option(False, "print the text while it is generated")


def ask(options: Ask) -> None:
    """Has a fine-tune continue a prompt, and prints the text while it is generated.

    Examples:
    kogpt2 ask sowol "나 보기가 역겨워" --max-new-tokens 40
    echo "산에는 꽃 피네" | kogpt2 ask sowol --temperature 0.8 --seed 1
    """
    send(options)


def run(options: Invoke) -> None:
    """Sends one prompt to one fine-tune, on your own server or on a SageMaker endpoint.

    The prompt is --text or standard input, in UTF-8. Prints the generated text, with --json the
    whole answer, and with --stream the text as it is generated, if the server can stream.

    Examples:
    kogpt2 invoke --model sowol --text "나 보기가 역겨워" --max-new-tokens 40
    echo "산에는 꽃 피네" | kogpt2 invoke --model sowol --json
    kogpt2 invoke --endpoint poets --model team/sowol --text "산에는 꽃 피네"
    kogpt2 invoke --endpoint one-model --text "산에는 꽃 피네" --stream
    """
    if options.stream and options.endpoint and options.model:
        raise Problem("SageMaker streams from endpoints of a single model only: leave out --stream")
    send(options)


def read_prompt(text: str | None) -> str:
    """`text`, or standard input if it is None. Raises `Problem` if it is empty or no UTF-8."""
    source = "the prompt"
    if text is None:
        if sys.stdin.isatty():
            print("type the prompt, then Ctrl-D", file=sys.stderr)
        source = "the prompt (standard input)"
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        text = text.removeprefix("\ufeff").rstrip("\r\n")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Problem(
            f"{source} is not UTF-8; convert it, for example with: iconv -f cp949 -t utf-8"
        ) from None
    if not text.strip():
        raise Problem(f"{source} is empty")
    return text


def send(options: Ask | Invoke) -> None:
    """Sends the prompt and prints the answer. Raises `CallFailed`, `Problem`."""
    from scripts.client.targets import Call, open_target

    parameters, prompt = options.parameters_given(), read_prompt(options.text)
    body = request_body(prompt, parameters, stream=options.stream)
    call = Call(options.model, body, options.stream)
    target = open_target(options)
    if options.dry_run:
        print(target.describe(call))
        return None
    end = time.monotonic() + options.wait
    while True:
        try:
            return show(options, target, call, prompt if options.return_full_text else "")
        except NotReady as error:
            if time.monotonic() + RETRY_S > end:
                raise
            print(f"{error} (next attempt in {RETRY_S:.0f} s)", file=sys.stderr)
            time.sleep(RETRY_S)


def show(options: Prompt, target: Any, call: Any, prefix: str) -> None:
    """Prints the answer of one attempt; `prefix` stands before streams, which have no prompt."""
    from scripts.client import answers

    completion = answers.Completion()
    start = time.monotonic()
    printed = False
    with target.call(call) as answer:
        prefix = prefix if answers.is_stream(answer.content_type) else ""
        if prefix and not options.json:
            print(prefix, end="", flush=True)
        for text in answers.texts(answer, completion):
            if not options.json:
                print(text, end="", flush=True)
                printed = True
    if not options.json:
        for _, text in sorted(completion.others.items()):
            print(f"\n\n{prefix}{text}", end="")
        print(flush=printed)
        return
    value = completion.value
    if value is None:  # a stream
        value = {
            "generated_text": prefix + completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
        }
        if completion.first_at is not None:
            value["time_to_first_token_s"] = round(completion.first_at - start, 6)
        texts = [prefix + text for _, text in sorted(completion.others.items())]
        if texts:
            value["sequences"] = [prefix + completion.text, *texts]
    print(json.dumps(value, ensure_ascii=False))
