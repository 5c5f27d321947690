"""Reads an answer: one JSON value, or a stream.

The content type says which: server-sent events (`data: {...}`), one JSON object a line, or a whole
answer. Known objects are this server's, `{"text", "token", "index"}` and at the end of a sequence
`{"generated_text", "tokens", "finish_reason", "index"}`; Hugging Face's, `{"token": {"text"},
"generated_text"?}`; and OpenAI's, `{"choices": [{"text"}]}`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scripts.client.errors import CallFailed
from scripts.client.targets import EVENTS, LINES, Answer, message_of


@dataclass
class Completion:
    """The content of an answer.

    tokens: number of generated tokens; None if the answer has none
    server_s: the model's time as the server reports it
    first_at: `time.monotonic()` at the first token of a stream; None for a whole answer
    value: the JSON of a whole answer; None for a stream
    others: texts of further sequences of a stream, by index
    """

    text: str = ""
    tokens: int | None = None
    finish_reason: str | None = None
    server_s: float | None = None
    first_at: float | None = None
    value: Any = None
    others: dict[int, str] = field(default_factory=dict)


def is_stream(content_type: str) -> bool:
    return content_type.split(";")[0].strip().lower() in (EVENTS, *LINES)


def read(answer: Answer) -> Completion:
    """Read a whole answer. Raises `CallFailed` if it is broken off or malformed."""
    completion = Completion()
    for _ in texts(answer, completion):
        pass
    return completion


def texts(answer: Answer, completion: Completion) -> Iterator[str]:
    """Yield the text as it arrives and fill in `completion`. Raises `CallFailed`."""
    if is_stream(answer.content_type):
        yield from _stream(answer, completion)
        return
    body = b"".join(answer.chunks)
    try:
        text = body.decode("utf-8")
        value = json.loads(text) if "json" in answer.content_type else text
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"the answer cannot be read: {error}", kind="broken answer") from None
    _whole(value, completion)
    yield completion.text


def _whole(value: Any, completion: Completion) -> None:
    completion.value = value
    if isinstance(value, list) and len(value) == 1:  # Hugging Face's servers: [{...}]
        value = value[0]
    if isinstance(value, str):
        completion.text = _clean(value)
    elif sequences := _sequences(value):
        completion.text = _clean("\n\n".join(s["generated_text"] for s in sequences))
        if all(isinstance(s.get("tokens"), int) for s in sequences):
            completion.tokens = sum(s["tokens"] for s in sequences)
        completion.finish_reason = value.get("finish_reason")
        completion.server_s = _seconds(value.get("seconds"))
    elif isinstance(value, list) and value and isinstance(value[0], str):
        # The guides' [text, steps, seconds], or without the steps.
        completion.text = _clean(value[0])
        if len(value) == 3 and isinstance(value[1], int):
            completion.tokens = value[1]
        completion.server_s = _seconds(value[-1])
    else:
        completion.text = _clean(json.dumps(value, ensure_ascii=False))


def _sequences(value: Any) -> list[dict[str, Any]]:
    """Return the sequences of this server's answer, or [] for another kind of answer."""
    if not isinstance(value, dict) or not isinstance(value.get("generated_text"), str):
        return []
    sequences = value.get("sequences") or [value]
    known = isinstance(sequences, list) and all(
        isinstance(_object(s).get("generated_text"), str) for s in sequences
    )
    return sequences if known else []


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e9 else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _clean(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _stream(answer: Answer, completion: Completion) -> Iterator[str]:
    sse = answer.content_type.lower().startswith(EVENTS)
    running: set[int] = {0}
    for event in _events(answer.chunks, sse):
        if event is None:
            running = set()
            break
        if "error" in event:
            message = message_of(json.dumps(event).encode())
            raise CallFailed(f"the stream broke off: {message}", kind="stream error")
        part = _part(event)
        completion.tokens = (completion.tokens or 0) + part.tokens
        if part.tokens:
            completion.first_at = completion.first_at or time.monotonic()
            running.add(part.index)
        if part.finish_reason is not None:
            running.discard(part.index)
        if part.index == 0:
            completion.finish_reason = part.finish_reason or completion.finish_reason
            completion.text += part.text
            yield part.text
        else:
            others = completion.others
            others[part.index] = others.get(part.index, "") + part.text
    if running:
        raise CallFailed("the stream broke off before its end", kind="stream error")


def _events(chunks: Iterator[bytes], sse: bool) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of a stream, and None for OpenAI's `[DONE]`."""
    for line in _lines(chunks):
        if sse:
            name, _, line = line.partition(":")
            if name != "data":  # comments, and names of events
                continue
            line = line.removeprefix(" ")
        if not line.strip():
            continue
        if line.strip() == "[DONE]":
            yield None
            return
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise CallFailed(
                f"the stream holds no JSON: {line[:80]!r}", kind="stream error"
            ) from None
        if not isinstance(value, dict):
            raise CallFailed(f"the stream holds no object: {line[:80]!r}", kind="stream error")
        yield value


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the lines of UTF-8 chunks, which may end within a line or a character."""
    rest = b""
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")


@dataclass(frozen=True)
class _Part:
    text: str
    index: int = 0  # number of the sequence
    tokens: int = 0
    finish_reason: str | None = None


def _part(event: dict[str, Any]) -> _Part:
    token, index = event.get("token"), event.get("index", 0)
    if isinstance(event.get("choices"), list):  # OpenAI's; the last one may have the usage only
        choice = _object(event["choices"][0]) if event["choices"] else {}
        text = choice.get("text") or _object(choice.get("delta")).get("content") or ""
        index, reason, tokens = choice.get("index", 0), choice.get("finish_reason"), int(bool(text))
    elif isinstance(token, dict):  # Hugging Face's, whose index counts tokens
        reason = _object(event.get("details")).get("finish_reason")
        if reason is None and event.get("generated_text") is not None:
            reason = "stop"
        text, index, tokens = "" if token.get("special") else token.get("text", ""), 0, 1
    elif token is None:  # the end of a sequence
        text, reason, tokens = "", event.get("finish_reason"), 0
    else:
        text, reason, tokens = event.get("text", ""), event.get("finish_reason"), 1
    if not (isinstance(text, str) and isinstance(index, int) and isinstance(reason, str | None)):
        raise CallFailed(
            f"the stream holds an object of an unknown form: {json.dumps(event)[:80]}",
            kind="stream error",
        )
    return _Part(_clean(text), index, tokens, reason)
