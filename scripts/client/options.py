"""Options of commands that send prompts, and the request made of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from command.errors import Problem
from command.options import option, seconds, server_url

DEFAULT_URL = "http://localhost:8080"
_target = partial(option, rich_help_panel="Where")
SAMPLING = "Sampling (default: greedy)"
_sampling = partial(option, rich_help_panel=SAMPLING)


@dataclass(kw_only=True)
class Target:
    """A server or an endpoint. Raises `Problem` for options that exclude each other."""

    url: str | None = _target(
        None,
        f"your own server ({DEFAULT_URL}); its token, if any: INFERENCE_TOKEN",
        parser=server_url,
        metavar="URL",
    )
    endpoint: str | None = _target(None, "a SageMaker endpoint instead", metavar="NAME")
    region: str | None = _target(None, "the endpoint's region (default: the AWS CLI's)")
    profile: str | None = _target(None, "the AWS CLI's profile with the credentials")
    timeout: float = _target("70", "for one answer, in seconds", parser=seconds, metavar="S")

    def __post_init__(self) -> None:
        if self.endpoint is None:
            for name in ("region", "profile"):
                if getattr(self, name) is not None:
                    raise Problem(f"--{name} is for --endpoint")
            self.url = self.url or DEFAULT_URL
        elif self.url is not None:
            raise Problem("give --url or --endpoint, not both")

    @property
    def where(self) -> str:
        return f"endpoint {self.endpoint}" if self.endpoint else str(self.url)


@dataclass(kw_only=True)
class Sampling:
    """Generation parameters of a request; the server checks the values."""

    max_new_tokens: int | None = _sampling(None, "tokens to generate at most", metavar="N")
    temperature: float | None = _sampling(
        None, "samples; below 1 likely tokens become likelier", metavar="X"
    )
    top_k: int | None = _sampling(None, "samples among the N likeliest tokens", metavar="N")
    top_p: float | None = _sampling(
        None, "samples among the likeliest tokens with this probability in total", metavar="X"
    )
    seed: int | None = _sampling(None, "same seed, same text", metavar="N")
    repetition_penalty: float | None = _sampling(
        None, "above 1: tokens of the prompt and answer become less likely", metavar="X"
    )
    frequency_penalty: float | None = _sampling(
        None, "above 0: a token becomes less likely with each occurrence in the answer", metavar="X"
    )
    presence_penalty: float | None = _sampling(
        None, "above 0: tokens of the answer become less likely", metavar="X"
    )
    num_return_sequences: int | None = _sampling(None, "sampled answers", metavar="N")
    logprobs: int | None = _sampling(
        None, "log-probabilities of the N likeliest tokens (with --json)", metavar="N"
    )
    stop: list[str] = option(
        [], "ends the answer there; repeatable", metavar="TEXT", rich_help_panel=SAMPLING
    )
    do_sample: bool = _sampling(False, "samples")
    return_full_text: bool = _sampling(False, "print the prompt before the answer")
    parameters: str | None = _sampling(
        None, "further ones as a JSON object, for a model with its own parameters", metavar="JSON"
    )

    def parameters_given(self) -> dict[str, Any]:
        """Return the parameters that were set. Raises `Problem` if --parameters is malformed."""
        names = [field.name for field in fields(Sampling) if field.name != "parameters"]
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
    """The body of a request to this server, in UTF-8."""
    body = {"inputs": inputs, "parameters": parameters, **({"stream": True} if stream else {})}
    return json.dumps(body, ensure_ascii=False).encode()
