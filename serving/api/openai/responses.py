"""OpenAI's Responses API, text in and text out: requests, answers and the events of streams.

No answer is stored: each request holds the whole conversation.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from common import fields
from common.errors import ServiceError
from common.parameters import MAX_LOGPROBS
from serving.api import answer_form
from serving.api.answer_form import GivenForm
from serving.api.answering import Renderer
from serving.api.openai.answers import Item, chat_logprobs, compact, token_name
from serving.api.openai.errors import Refused, error_body
from serving.api.openai.parsing import (
    MAX_TOKENS,
    NO_TOOLS,
    Body,
    Kind,
    NotDone,
    ParsedRequest,
    bounded,
    common_fields,
    known_fields,
    mapping,
    max_tokens,
    message,
    sampling,
    text,
)
from serving.api.schemas import fields_of

KNOWN = fields_of("OpenAIResponse")
STATELESS = "names what an earlier request left, and nothing is kept: send the whole input"
NOT_DONE: NotDone = {
    "previous_response_id": (STATELESS, ()),
    "conversation": (STATELESS, ()),
    "prompt": ("names a template that is kept at OpenAI: send input and instructions", ()),
    "background": ("can only be false: no answer is kept", (False,)),
    "truncation": ('can only be "disabled": of an input nothing is left out', ("disabled",)),
    "tools": (NO_TOOLS, ([],)),
    "tool_choice": (NO_TOOLS, ("none", "auto")),
}
PARTS = ("input_text", "output_text")  # of the user's messages, and of earlier answers
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, kw_only=True)
class ResponseRequest(ParsedRequest):
    """A request to the engine; `repeated` are the fields that its answer repeats."""

    repeated: Mapping[str, Any]


def parse(body: Body) -> ResponseRequest:
    """Parse a body of /v1/responses. Raises `Refused`."""
    given = known_fields(body, KNOWN, NOT_DONE)
    shared = common_fields(given)
    shared["form"] = answer_form.only([shared["form"], _text_format(given)])
    include = given.get("include", [])
    if not isinstance(include, list):
        raise Refused("include", "must be a list")
    top = fields.integer("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    parameters = sampling(given, 1, shared["form"])
    parameters["max_new_tokens"] = max_tokens(given, "max_output_tokens", MAX_TOKENS)
    logprobs = LOGPROBS in include
    if logprobs:
        parameters["logprobs"] = top
    messages = _input(given.get("input"))
    if "instructions" in given:
        instructions = text("instructions", given["instructions"])
        messages.insert(0, {"role": "system", "content": instructions})
    repeated = {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": mapping("metadata", given.get("metadata", {})),
        "parallel_tool_calls": bool(given.get("parallel_tool_calls", True)),
        "temperature": given.get("temperature", 1.0),
        "text": {"format": given.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [],
        "top_logprobs": top,
        "top_p": given.get("top_p", 1.0),
        "truncation": "disabled",
    }
    return ResponseRequest(
        kind=Kind.CHAT,
        prompts=[messages],
        parameters=parameters,
        logprobs=logprobs,
        repeated=repeated,
        **shared,
    )


def _text_format(given: Body) -> GivenForm | None:
    """Return the form in the field `text`, None without one.

    Raises `Refused` for fields of `text` or `reasoning` that would otherwise change the answer.
    """
    about = mapping("text", given.get("text", {}))
    if about.get("verbosity") not in (None, "medium"):
        raise Refused("text.verbosity", "is not supported by these models")
    for name, value in mapping("reasoning", given.get("reasoning", {})).items():
        if value not in (None, "none"):
            raise Refused(f"reasoning.{name}", "is for models that reason")
    form = about.get("format")
    return None if form is None else answer_form.typed("text.format", form)


def _input(value: Any) -> list[dict[str, str]]:
    """Convert the field `input` to messages for the model's chat template."""
    if isinstance(value, str):
        return [{"role": "user", "content": text("input", value)}]
    if not isinstance(value, list) or not value:
        raise Refused("input", "must be text, or a list of messages that is not empty")
    bounded("input", value)
    converted = []
    for i, item in enumerate(value):
        name = f"input[{i}]"
        kind = mapping(name, item).get("type") or "message"
        if kind != "message":
            raise Refused(f"{name}.type", f"must be message, is {kind!r:.50}: there are no tools")
        shown = {k: v for k, v in item.items() if k not in ("type", "id", "status", "phase")}
        converted.append(message(name, shown, PARTS))
    return converted


class Response(Renderer):
    """Writes an answer: whole, or as the events of a stream."""

    def __init__(self, parsed: ResponseRequest, model: str) -> None:
        self._parsed = parsed
        self._id, self._item_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self._head = {"id": self._id, "object": "response", "created_at": int(time.time())}
        self._head |= {"model": model, **parsed.repeated}
        self._text, self._logprobs = "", list[dict[str, Any]]()
        self._bare = list[orjson.Fragment]()  # the log-probabilities as events have them
        self._reason, self._tokens = "", 0
        self._prompt: Mapping[str, Any] = {}  # with `prompt_tokens` and `cached_tokens`
        self._events = 0

    def compact(self, token: Item) -> Item:
        return compact(token)

    def whole(self, results: Sequence[Mapping[str, Any]]) -> bytes:
        (self._prompt,) = results
        (completion,) = self._prompt["completions"]
        self._text, self._reason = completion["text"], completion["finish_reason"]
        self._tokens = completion["tokens"]
        if self._parsed.logprobs:
            self._logprobs = [chat_logprobs(step) for step in completion["logprobs"]]
        return orjson.dumps(self._body(self._status, [self._message(self._status)]))

    # A stream

    def begin(self) -> bytes:
        return (
            self._lifecycle("created", "in_progress")
            + self._lifecycle("in_progress", "in_progress")
            + self._event("output_item.added", item=self._message("in_progress", []))
            + self._event("content_part.added", **self._place, part=_part("", []))
        )

    def write(self, item: Item) -> bytes:
        self._prompt = self._prompt or item
        self._text += item["text"]
        self._tokens += 1
        self._reason = item.get("finish_reason", "")
        logprobs = [_bare(item["logprobs"])] if self._parsed.logprobs else []
        if logprobs:
            self._logprobs.append(chat_logprobs(item["logprobs"]))
            self._bare += logprobs
        elif not item["text"]:
            return b""
        return self._event(
            "output_text.delta", **self._place, delta=item["text"], logprobs=logprobs
        )

    def end(self) -> bytes:
        done = self._message(self._status)
        return (
            self._event("output_text.done", **self._place, text=self._text, logprobs=self._bare)
            + self._event("content_part.done", **self._place, part=done["content"][0])
            + self._event("output_item.done", item=done)
            + self._lifecycle(self._status, self._status, [done])
        )

    def broken(self, error: ServiceError) -> bytes:
        failure = {"code": "server_error", "message": error_body(error)["error"]["message"]}
        return self._lifecycle("failed", "failed", error=failure)

    # Parts of answers and of events

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "content_index": 0}

    def _lifecycle(self, kind: str, status: str, output: Any = (), error: Any = None) -> bytes:
        body = {"type": f"response.{kind}", "sequence_number": self._events}
        return self._sent({**body, "response": self._body(status, output, error)})

    def _event(self, kind: str, **more: Any) -> bytes:
        body = {"type": f"response.{kind}", "sequence_number": self._events, "output_index": 0}
        return self._sent({**body, **more})

    def _sent(self, body: Mapping[str, Any]) -> bytes:
        self._events += 1
        return f"event: {body['type']}\ndata: ".encode() + orjson.dumps(body) + b"\n\n"

    def _message(self, status: str, content: Any = None) -> dict[str, Any]:
        content = [_part(self._text, self._logprobs)] if content is None else content
        head = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**head, "status": status, "content": content}

    def _body(self, status: str, output: Any = (), error: Any = None) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete,
            "output": output,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "usage": self._usage() if over else None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, cached = self._prompt["prompt_tokens"], self._prompt["cached_tokens"]
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self._tokens,
        }


def _part(text: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _bare(step: Item) -> orjson.Fragment:
    """Return a token's log-probabilities as events have them, without bytes."""

    def shown(token: Item) -> dict[str, Any]:
        return {"token": token_name(token), "logprob": token["logprob"]}

    top = [shown(other) for other in step["top"]]
    return orjson.Fragment(orjson.dumps({**shown(step), "top_logprobs": top}))
