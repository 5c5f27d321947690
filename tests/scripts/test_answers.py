"""scripts/client/answers.py: every form of an answer and of a stream, however its bytes are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.client.answers import Completion, is_stream, read, texts
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
        "index": 2,
        "token": {"id": 9, "text": "는 꽃", "special": False},
        "generated_text": "산에는 꽃",
        "details": {"finish_reason": "stop"},
    },
]
OPENAI = [
    {"choices": [{"index": 0, "text": "산에", "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "는 꽃"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]


def ndjson(events: list[Any]) -> bytes:
    return b"".join(json.dumps(e, ensure_ascii=False).encode() + b"\n" for e in events)


def sse(events: list[Any], end: bytes = b"") -> bytes:
    lines = [b"event: token\ndata: " + ndjson([e]) + b"\r\n" for e in events]
    return b": a comment\n\n" + b"".join(lines) + end


def answer(kind: str, body: bytes, size: int = 3) -> Answer:
    """In pieces that cut letters in half."""

    def cut() -> Iterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return Answer(kind, cut())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-ndjson", ndjson(ENGINE)),
        ("application/x-ndjson", ndjson(OURS)),
        ("text/event-stream", sse(OURS)),
        ("application/jsonlines", ndjson(HUGGING_FACE)),
        ("text/event-stream; charset=utf-8", sse(ENGINE)),
        ("text/event-stream", sse(HUGGING_FACE)),
        ("text/event-stream", sse(OPENAI, b"data: [DONE]\n\n")),
    ],
)
def test_a_stream_becomes_its_text(kind: str, body: bytes, size: int) -> None:
    completion = Completion()
    shown = list(texts(answer(kind, body, size), completion))
    assert [piece for piece in shown if piece] == ["산에", "는 꽃"]
    assert completion.text == "산에는 꽃"
    assert (completion.tokens, completion.finish_reason) == (2, "stop")
    assert completion.first_at is not None


def test_sequences_of_a_stream_are_kept_apart() -> None:
    events = [
        {"index": 1, "token": 1, "text": "나"},
        {"index": 0, "token": 2, "text": "가"},
        {"index": 0, "token": 3, "text": "!", "finish_reason": "stop"},
        {"index": 1, "token": 4, "text": "?", "finish_reason": "length"},
    ]
    completion = read(answer("application/x-ndjson", ndjson(events)))
    assert (completion.text, completion.others, completion.tokens) == ("가!", {1: "나?"}, 4)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (ndjson(ENGINE[:1]), "before its end"),
        (ndjson(OURS[:2]), "before its end"),
        (ndjson([*OURS, {"index": 1, "token": 5, "text": "산"}]), "before its end"),
        (b"", "before its end"),
        (b"<html>\n", "no JSON"),
        (b"[1]\n", "no object"),
        (ndjson([*ENGINE[:1], {"error": {"code": 504, "message": "시간"}}]), "시간"),
    ],
)
def test_a_broken_stream_is_an_error(body: bytes, said: str) -> None:
    with pytest.raises(CallFailed, match=said):
        read(answer("application/x-ndjson", body))


@pytest.mark.parametrize(
    ("body", "text", "tokens", "seconds"),
    [
        ({"generated_text": "꽃", "tokens": 3, "seconds": 0.5}, "꽃", 3, 0.5),
        (["산에는 꽃", 3, 0.5], "산에는 꽃", 3, 0.5),
        (["산에는 꽃", 0.5], "산에는 꽃", None, 0.5),
        ([{"generated_text": "꽃"}], "꽃", None, None),
        ({"outputs": ["꽃"]}, '{"outputs": ["꽃"]}', None, None),
        (
            {
                "generated_text": "가",
                "tokens": 1,
                "seconds": 0.5,
                "sequences": [
                    {"generated_text": "가", "tokens": 1},
                    {"generated_text": "나", "tokens": 2},
                ],
            },
            "가\n\n나",
            3,
            0.5,
        ),
    ],
)
def test_an_answer_that_comes_whole(
    body: Any, text: str, tokens: int | None, seconds: float | None
) -> None:
    found = read(answer("application/json", json.dumps(body).encode()))
    assert (found.text, found.tokens, found.server_s) == (text, tokens, seconds)
    assert found.value == body
    assert found.first_at is None


def test_plain_text_and_broken_json() -> None:
    assert read(answer("text/plain; charset=utf-8", "꽃".encode())).text == "꽃"
    with pytest.raises(CallFailed, match="cannot be read"):
        read(answer("application/json", b"{"))


def test_the_content_type_tells_a_stream() -> None:
    assert is_stream("Text/Event-Stream; charset=utf-8")
    assert is_stream("application/x-ndjson")
    assert not is_stream("application/json")
    assert not is_stream("")
