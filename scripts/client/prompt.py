"""Sends one prompt and prints the answer: what `kogpt2 ask` and `kogpt2 invoke` share."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from command.errors import Problem
from command.options import option, seconds
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


def read_prompt(text: str | None) -> str:
    """Return `text`, or standard input if it is None. Raises `Problem` if empty or no UTF-8."""
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


def send(options: Prompt, model: str | None, text: str | None, *, stream: bool) -> None:
    """Send the prompt and print the answer. Raises `CallFailed`, `Problem`."""
    from scripts.client.targets import Call, open_target

    parameters, prompt = options.parameters_given(), read_prompt(text)
    body = request_body(prompt, parameters, stream=stream)
    call = Call(model, body, stream)
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
    """Print one attempt's answer. Streams lack the prompt, so `prefix` precedes them."""
    from scripts.client import answers

    completion = answers.Completion()
    start = time.monotonic()
    with target.call(call) as answer:
        prefix = prefix if answers.is_stream(answer.content_type) else ""
        for text in itertools.chain([prefix], answers.texts(answer, completion)):
            if not options.json:
                print(text, end="", flush=True)
    others = [prefix + text for _, text in sorted(completion.others.items())]
    if not options.json:
        print("".join(f"\n\n{text}" for text in others))
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
        if others:
            value["sequences"] = [prefix + completion.text, *others]
    print(json.dumps(value, ensure_ascii=False))
