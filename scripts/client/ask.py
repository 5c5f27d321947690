"""One prompt to one fine-tune, on a server of one's own or on a SageMaker endpoint."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from scripts.client.errors import NotReady
from scripts.client.options import Sampling, Target, request_body
from scripts.lib.problem import Problem
from scripts.options import argument, option, seconds

WAIT_S = 2.0  # between two tries of a model that is still being loaded


@dataclass(kw_only=True)
class Prompt(Target, Sampling):
    json: bool = option(False, "print all that the server says")
    dry_run: bool = option(False, "print the call, and do not send it")
    wait: float = option(
        "360",
        "how long to try while SageMaker is loading the model, seconds",
        parser=seconds,
        metavar="S",
    )


@dataclass(kw_only=True)
class Invoke(Prompt):
    model: str | None = option(
        None, "the fine-tune, with or without .tar.gz; none where there is one only"
    )
    text: str | None = option(None, "the prompt (standard input)")
    stream: bool = option(False, "print the text while it is made")


@dataclass(kw_only=True)
class Ask(Prompt):
    model: str = argument("the fine-tune")
    text: str | None = argument("the prompt (standard input)", None)
    stream: bool = option(True, "print the text while it is made", "--stream/--no-stream")


def ask(options: Ask) -> None:
    """Asks a fine-tune to go on with a prompt, and prints the text while it is made.

    Examples:
    kogpt2 ask sowol "나 보기가 역겨워" --max-new-tokens 40
    echo "산에는 꽃 피네" | kogpt2 ask sowol --temperature 0.8 --seed 1
    """
    send(options, options.model)


def invoke(options: Invoke) -> None:
    """Sends one prompt to one fine-tune, on a server of yours or on a SageMaker endpoint.

    The prompt is --text or standard input, in UTF-8. Prints the text that the model makes; with
    --json all that the server says. With --stream the text appears as it is made, where the server
    offers that.

    Examples:
    kogpt2 invoke --model sowol --text "나 보기가 역겨워" --max-new-tokens 40
    echo "산에는 꽃 피네" | kogpt2 invoke --model sowol --json
    kogpt2 invoke --endpoint poets --model team/sowol --text "산에는 꽃 피네"
    kogpt2 invoke --endpoint one-model --text "산에는 꽃 피네" --stream
    """
    if options.stream and options.endpoint and options.model:
        raise Problem("SageMaker streams from endpoints of a single model only: leave out --stream")
    send(options, options.model)


def prompt(given: str | None) -> str:
    """Raises `Problem` unless it is text."""
    if given is not None:
        text, where = given, "the prompt"
    else:
        if sys.stdin.isatty():
            print("type the prompt, then Ctrl-D", file=sys.stderr)
        text, where = sys.stdin.buffer.read().decode("utf-8", "surrogateescape"), "standard input"
        text = text.removeprefix("\ufeff").rstrip("\r\n")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Problem(
            f"{where} is not UTF-8; convert it, for example with: iconv -f cp949 -t utf-8"
        ) from None
    if not text.strip():
        raise Problem(f"the prompt ({where}) is empty" if given is None else "the prompt is empty")
    return text


def send(options: Ask | Invoke, model: str | None) -> None:
    """Raises `CallFailed`, `Problem`."""
    from scripts.client import answers
    from scripts.client.targets import Call, open_target

    given, text = options.given(), prompt(options.text)
    body = request_body(text, given, stream=options.stream)
    accept = answers.ACCEPT_STREAM if options.stream else "application/json"
    call = Call(model, body, accept=accept, stream=options.stream)
    target = open_target(options)
    if options.dry_run:
        print(target.describe(call))
        return None
    end = time.monotonic() + options.wait
    while True:
        try:
            return show(options, target, call, text if options.return_full_text else "")
        except NotReady as error:
            if time.monotonic() + WAIT_S > end:
                raise
            print(f"{error} (trying again in {WAIT_S:.0f} s)", file=sys.stderr)
            time.sleep(WAIT_S)


def show(options: Prompt, target: Any, call: Any, front: str) -> None:
    """Prints the answer of one try. Streams leave the prompt out: `front` is it, where wanted."""
    from scripts.client import answers

    completion = answers.Completion()
    began = time.monotonic()
    shown = False
    with target.call(call) as answer:
        front = front if answers.is_stream(answer.content_type) else ""
        if front and not options.json:
            print(front, end="", flush=True)
        for piece in answers.pieces(answer, completion):
            if not options.json:
                print(piece, end="", flush=True)
                shown = True
    if not options.json:
        for _, text in sorted(completion.others.items()):
            print(f"\n\n{front}{text}", end="")
        print(flush=shown)
        return
    value = completion.value
    if value is None:  # it came as a stream
        value = {
            "generated_text": front + completion.text,
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
        }
        if completion.first_at is not None:
            value["time_to_first_token_s"] = round(completion.first_at - began, 6)
        texts = [front + text for _, text in sorted(completion.others.items())]
        if texts:
            value["sequences"] = [front + completion.text, *texts]
    print(json.dumps(value, ensure_ascii=False))
