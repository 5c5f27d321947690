"""From an answer's bytes to its text, whether it comes whole or as a stream.

Streams are told by their content type: server-sent events (`data: {...}`) or one JSON object a
line. Known objects are this server's, `{"text", "token", "index"}` and at the end of a sequence
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
from scripts.client.targets import Answer, message_of

EVENTS = "text/event-stream"
LINES = ("application/x-ndjson", "application/jsonlines", "application/jsonl")
STREAMS = (EVENTS, *LINES)
# For a server that can: streams first, and otherwise whatever it does.
ACCEPT_STREAM = f"{EVENTS}, {LINES[0]};q=0.9, application/json;q=0.5"


@dataclass
class Completion:
    """What came back. `value` is the JSON of an answer that came whole.

    tokens: new ones, None where the answer does not say
    server_s: how long the model took, as the server says
    first_at: `time.monotonic()` at the first text of a stream, None for an answer that came whole
    """

    text: str = ""
    tokens: int | None = None
    finish_reason: str | None = None
    server_s: float | None = None
    first_at: float | None = None
    value: Any = None
    others: dict[int, str] = field(default_factory=dict)  # texts of further sequences, in a stream


def is_stream(content_type: str) -> bool:
    return content_type.split(";")[0].strip().lower() in STREAMS


def read(answer: Answer) -> Completion:
    """All of an answer. Raises `CallFailed` for one that breaks off or cannot be understood."""
    completion = Completion()
    for _ in pieces(answer, completion):
        pass
    return completion


def pieces(answer: Answer, completion: Completion) -> Iterator[str]:
    """Texts to show, as they come; `completion` is filled meanwhile. Raises `CallFailed`."""
    if is_stream(answer.content_type):
        yield from _stream(answer, completion)
        return
    body = b"".join(answer.pieces)
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
    """Those of an answer of ours; none where it is something else."""
    if not isinstance(value, dict) or not isinstance(value.get("generated_text"), str):
        return []
    found = value.get("sequences") or [value]
    known = isinstance(found, list) and all(
        isinstance(_object(s).get("generated_text"), str) for s in found
    )
    return found if known else []


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e9 else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can hold and no terminal can show."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _stream(answer: Answer, completion: Completion) -> Iterator[str]:
    sse = answer.content_type.lower().startswith(EVENTS)
    running: set[int] = {0}
    for event in _events(answer.pieces, sse):
        if event is None:
            running = set()
            break
        if "error" in event:
            said = message_of(json.dumps(event).encode())
            raise CallFailed(f"the stream broke off: {said}", kind="stream error")
        piece = _piece(event)
        completion.tokens = (completion.tokens or 0) + piece.tokens
        if piece.tokens:
            completion.first_at = completion.first_at or time.monotonic()
            running.add(piece.index)
        if piece.finish_reason is not None:
            running.discard(piece.index)
        if piece.index == 0:
            completion.finish_reason = piece.finish_reason or completion.finish_reason
            completion.text += piece.text
            yield piece.text
        else:
            texts = completion.others
            texts[piece.index] = texts.get(piece.index, "") + piece.text
    if running:
        raise CallFailed("the stream broke off before its end", kind="stream error")


def _events(chunks: Iterator[bytes], sse: bool) -> Iterator[dict[str, Any] | None]:
    """The objects of a stream; None is OpenAI's `[DONE]`."""
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
    """Lines of UTF-8, however the bytes are cut."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if rest:
        yield rest.decode("utf-8", "replace")


@dataclass(frozen=True)
class _Piece:
    text: str
    index: int = 0  # of the sequence
    tokens: int = 0
    finish_reason: str | None = None


def _piece(event: dict[str, Any]) -> _Piece:
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
        said = json.dumps(event)[:80]
        raise CallFailed(
            f"the stream holds an object of no known form: {said}", kind="stream error"
        )
    return _Piece(_clean(text), index, tokens, reason)
