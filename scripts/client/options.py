"""Options that the clients of servers and endpoints share, and the request they make."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from scripts.lib.problem import Problem
from scripts.options import option, seconds

DEFAULT_URL = "http://localhost:8080"
_where = partial(option, rich_help_panel="Where")
_how = partial(option, rich_help_panel="How to generate (greedy, unless told otherwise)")


@dataclass(kw_only=True)
class Target:
    """Where a call goes. Raises `Problem` for options that do not go together."""

    url: str | None = _where(
        None, f"a server of yours ({DEFAULT_URL}); its token, if any: INFERENCE_TOKEN"
    )
    endpoint: str | None = _where(None, "a SageMaker endpoint instead", metavar="NAME")
    region: str | None = _where(None, "of the endpoint (as the AWS CLI finds it)")
    profile: str | None = _where(None, "of the AWS credentials (as the AWS CLI finds it)")
    timeout: float = _where("70", "for one answer, seconds", parser=seconds, metavar="S")

    def __post_init__(self) -> None:
        if self.endpoint is None:
            for name in ("region", "profile"):
                if getattr(self, name) is not None:
                    raise Problem(f"--{name} is for --endpoint")
            self.url = self.url or DEFAULT_URL
            if not self.url.startswith(("http://", "https://")):
                raise Problem(f"--url is {self.url!r}, must begin with http:// or https://")
        elif self.url is not None:
            raise Problem("give --url or --endpoint, not both")

    @property
    def where(self) -> str:
        return f"endpoint {self.endpoint}" if self.endpoint else str(self.url)


@dataclass(kw_only=True)
class Sampling:
    """What a request says of the text that is wanted; the server checks the values."""

    max_new_tokens: int | None = _how(None, "at most so many tokens", metavar="N")
    temperature: float | None = _how(
        None, "draws, from a distribution that is sharper below 1", metavar="X"
    )
    top_k: int | None = _how(None, "draws among the K likeliest tokens", metavar="N")
    top_p: float | None = _how(
        None, "draws among the likeliest tokens that reach this probability", metavar="X"
    )
    seed: int | None = _how(None, "same seed, same text", metavar="N")
    repetition_penalty: float | None = _how(
        None, "above 1: tokens seen before become less likely", metavar="X"
    )
    frequency_penalty: float | None = _how(
        None, "above 0: less likely with each time that the answer has it", metavar="X"
    )
    presence_penalty: float | None = _how(
        None, "above 0: less likely once the answer has it", metavar="X"
    )
    num_return_sequences: int | None = _how(None, "so many drawn answers", metavar="N")
    logprobs: int | None = _how(
        None, "log-probabilities of so many tokens (with --json)", metavar="N"
    )
    stop: list[str] = option([], "ends there; repeatable", metavar="TEXT")
    do_sample: bool = _how(False, "draws")
    return_full_text: bool = _how(False, "the prompt in front")
    parameters: str | None = _how(
        None, "others, as an object, for a model that has its own", metavar="JSON"
    )

    def given(self) -> dict[str, Any]:
        """What was given of them. Raises `Problem`."""
        names = [one.name for one in fields(Sampling) if one.name != "parameters"]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given = {name: value for name, value in given.items() if value is not False and value != []}
        if self.parameters is not None:
            try:
                others = json.loads(self.parameters)
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
