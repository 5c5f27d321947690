"""The API of Hugging Face's Text Generation Inference, as `huggingface_hub` calls it.

TGI's own routes take such bodies; other routes recognize them by `parameters.details`, by
`parameters.adapter_id`, by an object as `parameters.grammar`, or by the User-Agent of
`huggingface_hub`, whose newer versions omit `details`. The model that `adapter_id` names answers,
whatever model the route names. A whole answer is

    {"generated_text", "details"?}

and each token of a stream, whose last two fields are null except in the last token, is

    {"index", "token": {"id", "text", "logprob", "special"}, "top_tokens"?, "generated_text",
     "details"}

https://huggingface.github.io/text-generation-inference/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from common import fields
from common.errors import InvalidRequest, ServiceError
from common.form import KINDS
from common.parameters import MAX_LOGPROBS, SAMPLING, Parameters
from serving.api import answer_form
from serving.api.answer_form import GivenForm
from serving.api.answering import EngineRequest, Renderer, event
from serving.api.engine_calls import Item
from serving.names import normal_name

# Parameters that are not supported, with the values that are accepted as they have no effect.
NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "truncate": (),
    "watermark": (False,),
}


@dataclass(frozen=True, kw_only=True)
class ParsedRequest(EngineRequest):
    """A request to the engine, and the options of its answer in TGI's format.

    before: the prompt if the answer begins with it, else ""
    top: whether the answer has the likeliest tokens of each step
    """

    details: bool
    before: str
    top: bool
    seed: int | None


CLIENT = "hf_hub/"  # in its User-Agent


def is_meant(body: Mapping[str, Any], agent: str) -> bool:
    parameters = body.get("parameters", {})
    if not isinstance(parameters, Mapping) or not isinstance(body.get("inputs"), str):
        return False
    grammar = isinstance(parameters.get("grammar"), Mapping)  # the engine's own grammar is text
    own = (parameters.get(name) is not None for name in ("details", "adapter_id"))
    return CLIENT in agent or grammar or any(own)


def parse(body: Mapping[str, Any]) -> ParsedRequest:
    """Parse a body of TGI's API. Raises `InvalidRequest`."""
    for name in body:
        if name not in ("inputs", "parameters", "stream"):
            raise InvalidRequest(f"{name} is not known; known are inputs, parameters, stream")
    inputs: str = body["inputs"]
    if not inputs.strip() or "\0" in inputs:
        raise InvalidRequest("inputs must be text that is not empty, without NUL")
    parameters = body.get("parameters")
    parameters = fields.mapping("parameters", {} if parameters is None else parameters)
    given = {k: v for k, v in parameters.items() if v is not None}
    adapter = adapter_of(body)
    given.pop("adapter_id", None)
    for name, harmless in NOT_DONE.items():
        if name in given and given.pop(name) not in harmless:
            elsewhere = "; /v1/completions has it" if name == "best_of" else ""
            raise InvalidRequest(f"parameters.{name} is not supported{elsewhere}")
    details = fields.boolean("parameters.details", given.pop("details", False))
    top, logprobs = (
        fields.integer(f"parameters.{name}", given.pop(name, 0), 0, MAX_LOGPROBS)
        for name in ("top_n_tokens", "logprobs")
    )
    given["logprobs"] = max(top, logprobs)
    if not given.get("stop"):
        given.pop("stop", None)  # clients send an empty list for the model's own stop sequences
    if given.get("do_sample") is False and any(name in given for name in SAMPLING):
        del given["do_sample"]  # TGI samples even so
    form = None
    if isinstance(given.get("grammar"), Mapping):
        form = answer_form.typed("parameters.grammar", given.pop("grammar"))
        own = [
            GivenForm(f"parameters.{kind}", kind, given[kind]) for kind in KINDS if kind in given
        ]
        answer_form.only([form, *own])
        given |= form.parameters if form else {}
    checked = Parameters.parse(given, {"do_sample": True})
    if checked.num_return_sequences > 1:
        raise InvalidRequest("parameters.num_return_sequences must be 1 with parameters.details")
    return ParsedRequest(
        prompts=[inputs],
        parameters=given,
        stream=fields.boolean("stream", body.get("stream", False)),
        form=form,
        adapter=adapter,
        details=details,
        before=inputs if checked.return_full_text else "",
        top=bool(top),
        seed=checked.seed,
    )


def adapter_of(body: Mapping[str, Any]) -> str:
    """Return the model that `adapter_id` in a body names, or "". Raises `InvalidRequest`."""
    parameters = body.get("parameters")
    given = parameters.get("adapter_id") if isinstance(parameters, Mapping) else None
    if given is not None and (not isinstance(given, str) or not given.strip("/")):
        raise InvalidRequest("parameters.adapter_id must be a model's name")
    return normal_name(given).lstrip("/") if given else ""


class Text(Renderer):
    """Writes an answer in TGI's format, whole or token by token."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._parsed, self._prompt_tokens = parsed, 0
        self._text, self._count = parsed.before, 0

    def whole(self, results: Sequence[Mapping[str, Any]]) -> bytes:
        (result,) = results
        (completion,) = result["completions"]
        self._prompt_tokens = result["prompt_tokens"]
        pairs = zip(completion["texts"], completion["logprobs"], strict=True)
        items: list[Item] = [{"text": text, "logprobs": step} for text, step in pairs]
        items[-1]["finish_reason"] = completion["finish_reason"]
        events = [self.add(item) for item in items]
        body = {"generated_text": events[-1]["generated_text"]}
        if self._parsed.details:
            body["details"] = {
                **events[-1]["details"],
                "prefill": [_token(token) for token in completion.get("prefill", [])],
                "tokens": [event["token"] for event in events],
            }
            if self._parsed.top:
                body["details"]["top_tokens"] = [event["top_tokens"] for event in events]
        return orjson.dumps(body)

    def write(self, item: Item) -> bytes:
        self._prompt_tokens = item.get("prompt_tokens", self._prompt_tokens)
        return event(self.add(item))

    def broken(self, error: ServiceError) -> bytes:
        return event(error_body(error))

    def add(self, item: Item) -> dict[str, Any]:
        """Return the event of a token from the engine; the events' texts are the answer's text."""
        step, text, reason = item["logprobs"], item["text"], item.get("finish_reason")
        self._text += text
        self._count += 1
        # Clients omit the text of special tokens, but a text here was held back from earlier ones.
        token = {**_token(step), "text": text}
        token["special"] = token["special"] and not text
        sent = {"index": self._count, "token": token, "generated_text": None, "details": None}
        if self._parsed.top:
            sent["top_tokens"] = [_token(top) for top in step["top"]]
        if reason is None:
            return sent
        sent["generated_text"] = self._text
        if self._parsed.details:
            stop = "eos_token" if step.get("special") else "stop_sequence"
            sent["details"] = {
                "finish_reason": stop if reason == "stop" else reason,
                "generated_tokens": self._count,
                "input_length": self._prompt_tokens,
                "seed": self._parsed.seed,
            }
        return sent


def error_body(error: ServiceError) -> dict[str, Any]:
    kind = "generation" if error.status >= 500 else "validation"
    return {
        "error": error.message,
        "error_type": "overloaded" if error.status in (429, 503) else kind,
    }


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": token["token"],
        "text": token["text"],
        "logprob": token.get("logprob"),
        "special": token.get("special", False),
    }
