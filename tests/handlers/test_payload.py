from __future__ import annotations

import json

import pytest

from common.errors import EngineError, InvalidRequest, UnsupportedMediaType
from handlers.payload import Form, answer_type, format_answer, parse, to_json

ANSWER = {
    "completions": [{"text": " 가실 때에는", "tokens": 3, "finish_reason": "stop"}],
    "seconds": 0.25,
    "time_to_first_token_s": 0.1,
}


@pytest.mark.parametrize("body", [bytes, bytearray, lambda text: text.decode()])
def test_the_body_may_be_bytes_or_text(body: type) -> None:
    request = parse(body('{"inputs": "나 보기가"}'.encode()), "application/json")
    assert (request.form, request.inputs, request.parameters) == (Form.OBJECT, "나 보기가", {})


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json",
        "Application/JSON; charset=UTF-8",
        'application/json;charset="utf8"',
    ],
)
def test_json_is_the_default_with_or_without_its_charset(content_type: str | None) -> None:
    assert parse('"산에는"'.encode(), content_type).form is Form.GUIDE


@pytest.mark.parametrize(
    ("content_type", "message"),
    [
        ("text/csv", "must be application/json or text/plain"),
        ("application/x-npy", "must be application/json or text/plain"),
        ("한글", "must be application/json or text/plain"),
        ("text/plain; charset=euc-kr", "charset euc-kr, must be UTF-8"),
        ("application/json; charset=utf-16", "charset utf-16, must be UTF-8"),
    ],
)
def test_other_types_are_refused_by_name(content_type: str, message: str) -> None:
    with pytest.raises(UnsupportedMediaType, match=message):
        parse(b"{}", content_type)


@pytest.mark.parametrize("text", ["", "   ", "\n"])
@pytest.mark.parametrize("form", ['{"inputs": %s}', "%s"])
def test_empty_text_is_refused_in_every_form(text: str, form: str) -> None:
    with pytest.raises(InvalidRequest, match="inputs is empty"):
        parse((form % json.dumps(text)).encode(), "application/json")
    with pytest.raises(InvalidRequest, match="inputs is empty"):
        parse(text.encode(), "text/plain")


@pytest.mark.parametrize(
    ("body", "message"),
    [
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
    ],
)
def test_an_invalid_body_is_refused_with_the_field(body: str | bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse(body, "application/json")
    caught.value.message.encode("utf-8")


@pytest.mark.parametrize(
    ("accept", "form", "expected"),
    [
        (None, Form.OBJECT, "application/json"),
        ("*/*", Form.TEXT, "text/plain"),
        ("application/json", Form.TEXT, "application/json"),
        ("text/plain", Form.GUIDE, "text/plain"),
    ],
)
def test_the_answers_type_follows_accept(accept: str | None, form: Form, expected: str) -> None:
    assert answer_type(accept, form) == expected


def test_the_object_form() -> None:
    request = parse('{"inputs": "나 보기가"}'.encode(), None)
    body, kind = format_answer(request, ANSWER, "application/json")
    assert kind == "application/json"
    assert json.loads(body) == {
        "generated_text": " 가실 때에는",
        "tokens": 3,
        "finish_reason": "stop",
        "seconds": 0.25,
    }
    assert "가실".encode() in body  # Korean is not escaped


def test_the_guides_form_has_the_prompt_in_front() -> None:
    request = parse(rb'"\ub098"', None)
    body, _ = format_answer(request, ANSWER, "application/json")
    assert json.loads(body) == ["나 가실 때에는", 2, 0.25]  # `</s>` is no step of the guide's
    full = {**ANSWER, "completions": [{**ANSWER["completions"][0], "finish_reason": "length"}]}
    body, _ = format_answer(request, full, "application/json")
    assert json.loads(body) == ["나 가실 때에는", 3, 0.25]


def test_the_full_text_on_request() -> None:
    request = parse('{"inputs": "나", "parameters": {"return_full_text": true}}'.encode(), None)
    body, _ = format_answer(request, ANSWER, "text/plain")
    assert body.decode() == "나 가실 때에는"


def test_several_sequences_come_as_a_list_beside_the_first() -> None:
    request = parse('{"inputs": "나"}'.encode(), None)
    two = {**ANSWER, "completions": [*ANSWER["completions"], {"text": " 말없이", "tokens": 1}]}
    value = json.loads(format_answer(request, two, "application/json")[0])
    assert value["generated_text"] == " 가실 때에는"
    assert [s["generated_text"] for s in value["sequences"]] == [" 가실 때에는", " 말없이"]


def test_inputs_may_be_the_fields_of_a_template() -> None:
    body = {"inputs": {"text": "안녕", "sentiment": ""}, "parameters": {"max_new_tokens": 3}}
    request = parse(json.dumps(body).encode(), "application/json")
    assert request.inputs == body["inputs"]
    answer, _ = format_answer(request, ANSWER, "application/json")
    assert json.loads(answer)["generated_text"] == " 가실 때에는"


HALF = "\\ud83d"


@pytest.mark.parametrize(
    "body",
    [
        f'{{"inputs": "{HALF}"}}',
        f'{{"inputs": "a", "{HALF}": 1}}',
        f'{{"inputs": "a", "parameters": {{"{HALF}": 1}}}}',
        f'{{"inputs": "a", "parameters": {{"stop": "{HALF}"}}}}',
        f'{{"inputs": {{"{HALF}": "a"}}}}',
        f'{{"inputs": "a", "stream": true, "{HALF}": 1}}',
        f'"{HALF} 나"',
        '{"inputs": "\ud83d"}',  # a body that is text already
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(body: str) -> None:
    with pytest.raises(InvalidRequest, match="half a surrogate pair") as caught:
        parse(body, "application/json")
    to_json(caught.value.to_body())


def test_both_halves_are_a_character() -> None:
    assert parse(rb'{"inputs": "\ud83d\ude00 \\ud83d \ub098"}', None).inputs == "😀 \\ud83d 나"


def test_lone_surrogates_are_written_as_escapes() -> None:
    assert json.loads(to_json({"\ud800": ["나 \udfff"]})) == {"\ud800": ["나 \udfff"]}
    error = EngineError("\ud800" * 1_000_000 + "끝")
    assert len(to_json(error.to_body())) < 10_000
    assert error.message.startswith("\\ud800")
    assert error.message.endswith("끝")
