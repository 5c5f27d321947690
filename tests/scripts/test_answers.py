"""Answers and streams as the client's commands read them, however their bytes are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.client.answers import Completion, read, texts
from scripts.client.errors import CallFailed
from scripts.client.targets import Answer

ENGINE = [
    {"index": 0, "token": 5, "text": "산에"},
    {"index": 0, "token": 9, "text": "는 꽃", "finish_reason": "stop"},
]
OURS = [
    {"index": 0, "token": 5, "text": "산에"},
    {"index": 0, "token": 9, "text": "는 꽃"},
    {"index": 0, "generated_text": "산에는 꽃", "tokens": 2, "finish_reason": "stop"},
]
HUGGING_FACE = [
    {"index": 1, "token": {"id": 5, "text": "산에", "special": False}, "generated_text": None},
    {
        **{"index": 2, "token": {"id": 9, "text": "는 꽃", "special": False}},
        **{"generated_text": "산에는 꽃", "details": {"finish_reason": "stop"}},
    },
]
OPENAI = [
    {"choices": [{"index": 0, "text": "산에", "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "는 꽃"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]
LINES, EVENTS = "application/x-ndjson", "text/event-stream"
TWO = [{"generated_text": "가", "tokens": 1}, {"generated_text": "나", "tokens": 2}]


def lines(events: list[Any]) -> bytes:
    return b"".join(json.dumps(e, ensure_ascii=False).encode() + b"\n" for e in events)


def sse(events: list[Any], end: bytes = b"") -> bytes:
    return b"".join(
        [b": a comment\n\n", *(b"event: token\ndata: " + lines([e]) + b"\r\n" for e in events), end]
    )


def answer(kind: str, body: bytes, size: int = 3) -> Answer:
    """An answer in pieces of `size` bytes, which cut letters in half."""
    return Answer(kind, (body[at : at + size] for at in range(0, len(body), size)))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (LINES, lines(ENGINE)),
        (LINES, lines(OURS)),
        ("application/jsonlines", lines(HUGGING_FACE)),
        (EVENTS, sse(OURS)),
        ("Text/Event-Stream; charset=utf-8", sse(ENGINE)),
        (EVENTS, sse(HUGGING_FACE)),
        (EVENTS, sse(OPENAI, b"data: [DONE]\n\n")),
    ],
)
def test_a_stream_becomes_its_text(kind: str, body: bytes) -> None:
    for size in (1, 3, 10_000):
        completion = Completion()
        pieces = [piece for piece in texts(answer(kind, body, size), completion) if piece]
        assert (pieces, completion.text) == (["산에", "는 꽃"], "산에는 꽃")
        assert (completion.tokens, completion.finish_reason) == (2, "stop")
        assert completion.first_at is not None


def test_sequences_of_a_stream_are_kept_apart() -> None:
    events = [
        {"index": 1, "token": 1, "text": "나"},
        {"index": 0, "token": 2, "text": "가"},
        {"index": 0, "token": 3, "text": "!", "finish_reason": "stop"},
        {"index": 1, "token": 4, "text": "?", "finish_reason": "length"},
    ]
    completion = read(answer(LINES, lines(events)))
    assert (completion.text, completion.others, completion.tokens) == ("가!", {1: "나?"}, 4)


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (LINES, lines(ENGINE[:1]), "before its end"),
        (LINES, lines(OURS[:2]), "before its end"),
        (LINES, lines([*OURS, {"index": 1, "token": 5, "text": "산"}]), "before its end"),
        (LINES, b"", "before its end"),
        (LINES, b"<html>\n", "no JSON"),
        (LINES, b"[1]\n", "no object"),
        (LINES, lines([*ENGINE[:1], {"error": {"code": 504, "message": "시간"}}]), "시간"),
        ("application/json", b"{", "cannot be read"),
    ],
)
def test_a_broken_answer_is_an_error(kind: str, body: bytes, message: str) -> None:
    with pytest.raises(CallFailed, match=message):
        read(answer(kind, body))


@pytest.mark.parametrize(
    ("value", "text", "tokens", "seconds"),
    [
        ({"generated_text": "꽃", "tokens": 3, "seconds": 0.5}, "꽃", 3, 0.5),
        (["산에는 꽃", 3, 0.5], "산에는 꽃", 3, 0.5),
        (["산에는 꽃", 0.5], "산에는 꽃", None, 0.5),
        ([{"generated_text": "꽃"}], "꽃", None, None),
        ({"outputs": ["꽃"]}, '{"outputs": ["꽃"]}', None, None),
        ({**TWO[0], "seconds": 0.5, "sequences": TWO}, "가\n\n나", 3, 0.5),
        ("꽃", "꽃", None, None),
    ],
)
def test_a_whole_answer(value: Any, text: str, tokens: int | None, seconds: float | None) -> None:
    is_text = isinstance(value, str)
    kind = "text/plain; charset=utf-8" if is_text else "application/json"
    completion = read(answer(kind, value.encode() if is_text else json.dumps(value).encode()))
    assert (completion.text, completion.tokens, completion.server_s) == (text, tokens, seconds)
    assert (completion.value, completion.first_at) == (value, None)
