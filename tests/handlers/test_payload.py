"""Bodies of text requests, and the forms of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import EngineError, InvalidRequest, UnsupportedMediaType
from handlers.payload import BodyKind, answer_type, format_answer, parse, to_json

FIRST = {"text": " 가실", "tokens": 3, "finish_reason": "stop"}
JSON, TEXT = "application/json", "text/plain"


@pytest.mark.parametrize(
    "content_type", [None, "", JSON, "Application/JSON; charset=UTF-8", f'{JSON};charset="utf8"']
)
def test_json_is_the_default_with_or_without_its_charset(content_type: str | None) -> None:
    assert parse('"산에는"'.encode(), content_type).body_kind is BodyKind.GUIDE
    body = '{"inputs": "나 보기가"}'
    for sent in (body, body.encode()):
        request = parse(sent, content_type)
        assert (request.body_kind, request.inputs, request.parameters) == (
            BodyKind.OBJECT,
            "나 보기가",
            {},
        )


@pytest.mark.parametrize(
    ("content_type", "message"),
    [
        ("text/csv", "must be application/json or text/plain"),
        ("한글", "must be application/json or text/plain"),
        ("text/plain; charset=euc-kr", "charset euc-kr, must be UTF-8"),
        ("application/json; charset=utf-16", "charset utf-16, must be UTF-8"),
    ],
)
def test_other_types_are_refused_by_name(content_type: str, message: str) -> None:
    with pytest.raises(UnsupportedMediaType, match=message):
        parse(b"{}", content_type)


INVALID: list[tuple[str | bytes, str]] = [
    *((json.dumps(text), "inputs is empty") for text in ("", "   ", "\n")),
    ('{"inputs": ""}', "inputs is empty"),
    (b" \n", "inputs is empty"),
    ('{"inputs": null}', "inputs must be a string"),
    ('{"inputs": ["가"]}', "inputs must be a string, or an object"),
    ('{"입력": "가"}', "입력 is not known"),
    ('{"inputs": "가", "parameters": "많이"}', "parameters must be a JSON object"),
    ('{"inputs": "가", "parameters": {"온도": 1}}', "parameters.온도 is not known"),
    ("3", "the body must be"),
    ("[" * 100_000, "not JSON"),
    ("{", "not JSON"),
    ("NaN", "the body must be"),
    (b'"\xff"', "byte 1"),
    ('{"inputs": {"text": 1}}', "inputs.text must be a string"),
    ('{"inputs": {"text": ["가"]}}', "inputs.text must be a string"),
    ('{"inputs": {"text": " ", "기분": ""}}', "inputs is empty"),
    ('{"inputs": {}}', "inputs is empty"),
    (
        '{"inputs": {"text": "안녕"}, "parameters": {"return_full_text": true}}',
        "return_full_text needs inputs to be a string",
    ),
]
HALF = "\\ud83d"  # of a surrogate pair
HALVES = [
    f'{{"inputs": "{HALF}"}}',
    f'{{"inputs": "a", "{HALF}": 1}}',
    f'{{"inputs": "a", "parameters": {{"{HALF}": 1}}}}',
    f'{{"inputs": "a", "parameters": {{"stop": "{HALF}"}}}}',
    f'{{"inputs": {{"{HALF}": "a"}}}}',
    f'{{"inputs": "a", "stream": true, "{HALF}": 1}}',
    f'"{HALF} 나"',
    '{"inputs": "\ud83d"}',  # a body that is text already
]


@pytest.mark.parametrize(
    ("body", "message"), [*INVALID, *((body, "half a surrogate pair") for body in HALVES)]
)
def test_an_invalid_body_is_refused_with_the_field(body: str | bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse(body, TEXT if body == b" \n" else JSON)
    caught.value.message.encode("utf-8")
    to_json(caught.value.to_body())


@pytest.mark.parametrize(
    ("accept", "body_kind", "expected"),
    [
        (None, BodyKind.OBJECT, JSON),
        ("*/*", BodyKind.TEXT, TEXT),
        (JSON, BodyKind.TEXT, JSON),
        (TEXT, BodyKind.GUIDE, TEXT),
    ],
)
def test_the_answers_type_follows_accept(
    accept: str | None, body_kind: BodyKind, expected: str
) -> None:
    assert answer_type(accept, body_kind) == expected


FULL = {"return_full_text": True}
CUT_OFF, SECOND = {**FIRST, "finish_reason": "length"}, {"text": " 말없이", "tokens": 1}
SEQUENCES = [
    {"generated_text": " 가실", "tokens": 3, "finish_reason": "stop"},
    {"generated_text": " 말없이", "tokens": 1},
]
OBJECT = {**SEQUENCES[0], "seconds": 0.25}


@pytest.mark.parametrize(
    ("body", "completions", "expected"),
    [
        ({"inputs": "나 보기가"}, [FIRST], OBJECT),
        ({"inputs": {"text": "안녕", "sentiment": ""}}, [FIRST], OBJECT),
        ({"inputs": "나", "parameters": FULL}, [FIRST], {**OBJECT, "generated_text": "나 가실"}),
        ({"inputs": "나"}, [FIRST, SECOND], {**OBJECT, "sequences": SEQUENCES}),
        ("나", [FIRST], ["나 가실", 2, 0.25]),  # `</s>` is no step of the guide's
        ("나", [CUT_OFF], ["나 가실", 3, 0.25]),
    ],
)
def test_an_answer_has_the_form_of_its_request(body: Any, completions: Any, expected: Any) -> None:
    request, answer = parse(json.dumps(body), None), {"completions": completions, "seconds": 0.25}
    written, kind = format_answer(request, answer, JSON)
    assert (json.loads(written), kind) == (expected, JSON)
    assert "가실".encode() in written  # Korean is not escaped
    prompt = "나" if "나 가실" in str(expected) else ""
    text = "\n\n".join(prompt + completion["text"] for completion in completions)
    assert format_answer(request, answer, TEXT) == (text.encode(), f"{TEXT}; charset=utf-8")


def test_a_whole_surrogate_pair_is_a_character_and_half_of_one_is_written_as_an_escape() -> None:
    assert parse(rb'{"inputs": "\ud83d\ude00 \\ud83d \ub098"}', None).inputs == "😀 \\ud83d 나"
    assert json.loads(to_json({"\ud800": ["나 \udfff"]})) == {"\ud800": ["나 \udfff"]}
    error = EngineError("\ud800" * 1_000_000 + "끝")
    assert len(to_json(error.to_body())) < 10_000
    assert error.message.startswith("\\ud800")
    assert error.message.endswith("끝")
