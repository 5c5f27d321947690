"""From an answer's bytes to its text, whether it comes whole or as a stream.

Streams are told by their content type: server-sent events (`data: {...}`) or one JSON object a
line. Known objects are the engine's own, `{"index", "token", "text", "finish_reason"?}`; Hugging
Face's, `{"token": {"text"}, "generated_text"?}`; and OpenAI's, `{"choices": [{"text"}]}`.
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
        completion.text = value
    elif isinstance(value, dict) and isinstance(value.get("generated_text"), str):
        sequences = value.get("sequences") or [value]
        completion.text = "\n\n".join(str(s["generated_text"]) for s in sequences)
        if all(isinstance(s.get("tokens"), int) for s in sequences):
            completion.tokens = sum(s["tokens"] for s in sequences)
        completion.finish_reason = value.get("finish_reason")
        completion.server_s = value.get("seconds")
    elif isinstance(value, list) and value and isinstance(value[0], str):
        # The guides' [text, steps, seconds], or without the steps.
        completion.text = value[0]
        completion.tokens = int(value[1]) if len(value) == 3 else None
        completion.server_s = float(value[-1]) if len(value) > 1 else None
    else:
        completion.text = json.dumps(value, ensure_ascii=False)


def _stream(answer: Answer, completion: Completion) -> Iterator[str]:
    sse = answer.content_type.lower().startswith(EVENTS)
    ended = False
    for event in _events(answer.pieces, sse):
        if event is None:
            ended = True
            break
        if "error" in event:
            said = message_of(json.dumps(event, ensure_ascii=False).encode())
            raise CallFailed(f"the stream broke off: {said}", kind="stream error")
        text, index, tokens, reason = _token(event)
        completion.tokens = (completion.tokens or 0) + tokens
        if tokens and completion.first_at is None:
            completion.first_at = time.monotonic()
        if reason is not None:
            ended, completion.finish_reason = True, reason
        if index == 0:
            completion.text += text
            yield text
        else:
            completion.others[index] = completion.others.get(index, "") + text
    if not ended:
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


def _token(event: dict[str, Any]) -> tuple[str, int, int, str | None]:
    """Text, which sequence, tokens, and why it ends there."""
    if isinstance(event.get("choices"), list):
        if not event["choices"]:  # OpenAI's last one, with the usage
            return "", 0, 0, None
        choice = event["choices"][0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        return text, choice.get("index", 0), int(bool(text)), choice.get("finish_reason")
    token = event.get("token")
    details = event.get("details") or {}
    reason = event.get("finish_reason") or details.get("finish_reason")
    if isinstance(token, dict):
        text = "" if token.get("special") else str(token.get("text", ""))
        if reason is None and event.get("generated_text") is not None:
            reason = "stop"
        return text, 0, 1, reason  # its "index" counts tokens
    return str(event.get("text", "")), event.get("index", 0), int(token is not None), reason
