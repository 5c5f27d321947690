"""The options that the clients share: where the server is, and how to generate."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from scripts.lib.problem import Problem

DEFAULT_URL = "http://localhost:8080"
NUMBERS: dict[str, tuple[Callable[[str], int | float], str]] = {
    "max_new_tokens": (int, "at most so many tokens"),
    "temperature": (float, "draws, from a distribution that is sharper below 1"),
    "top_k": (int, "draws among the K likeliest tokens"),
    "top_p": (float, "draws among the likeliest tokens that reach this probability"),
    "seed": (int, "same seed, same text"),
    "repetition_penalty": (float, "above 1: tokens seen before become less likely"),
    "frequency_penalty": (float, "above 0: less likely with each time that the answer has it"),
    "presence_penalty": (float, "above 0: less likely once the answer has it"),
    "num_return_sequences": (int, "so many drawn answers"),
    "logprobs": (int, "log-probabilities of so many tokens (with --json)"),
}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    add = group.add_argument
    add("--url", help=f"a server of yours ({DEFAULT_URL}); its token, if any: INFERENCE_TOKEN")
    add("--endpoint", metavar="NAME", help="a SageMaker endpoint instead")
    add("--region", help="of the endpoint (as the AWS CLI finds it)")
    add("--profile", help="of the AWS credentials (as the AWS CLI finds it)")
    add("--timeout", type=seconds, default=70.0, metavar="S", help="for one answer, seconds (70)")


def check_target(args: argparse.Namespace) -> None:
    """Raises `Problem` for options that do not go together."""
    if args.endpoint is None:
        for name in ("region", "profile"):
            if getattr(args, name) is not None:
                raise Problem(f"--{name} is for --endpoint")
        args.url = args.url or DEFAULT_URL
        if not args.url.startswith(("http://", "https://")):
            raise Problem(f"--url is {args.url!r}, must begin with http:// or https://")
    elif args.url is not None:
        raise Problem("give --url or --endpoint, not both")


def add_parameters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how to generate (greedy, unless told otherwise)")
    for name, (kind, said) in NUMBERS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=said
        )
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends there; repeatable")
    group.add_argument("--do-sample", action="store_true", default=None, help="draws")
    group.add_argument(
        "--return-full-text", action="store_true", default=None, help="the prompt in front"
    )
    group.add_argument(
        "--parameters", metavar="JSON", help="others, as an object, for a model that has its own"
    )


def parameters(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of them. The server checks the values. Raises `Problem`."""
    names = (*NUMBERS, "stop", "do_sample", "return_full_text")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.parameters is not None:
        try:
            others = json.loads(args.parameters)
        except ValueError as error:
            raise Problem(f"--parameters is not JSON: {error}") from None
        if not isinstance(others, dict):
            raise Problem('--parameters must be a JSON object, like {"top_k": 5}')
        given |= others
    return given


def request_body(inputs: str, parameters: dict[str, Any], *, stream: bool) -> bytes:
    """What the server takes; Korean stays readable."""
    body = {"inputs": inputs, "parameters": parameters, **({"stream": True} if stream else {})}
    return json.dumps(body, ensure_ascii=False).encode()
