"""Bodies of requests to a classifier, and the forms of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest, UnsupportedMediaType
from common.media_types import CSV, JSON, TEXT
from handlers.text.classifier import format_answer, parse, text_entries

ABOUT = {"labels": ["a", "b", "c"], "function": "softmax", "of_tokens": False}
RESULTS = [{"logits": [[1.0, 3.0, 2.0]]}, {"logits": [[0.5, -1.0, -2.0]]}]


def answer(inputs: Any, **parameters: Any) -> Any:
    body = {"inputs": inputs, "parameters": parameters}
    request = parse(json.dumps(body).encode(), JSON)
    pairs = zip(request.texts, RESULTS, strict=False)
    entries = [text_entries(parts, result, ABOUT, request.options) for parts, result in pairs]
    return labels(format_answer(request, entries, ABOUT))


def labels(made: Any) -> Any:
    return [labels(one) for one in made] if isinstance(made, list) else made["label"]


def test_the_forms_of_an_answer() -> None:
    assert answer("봄") == ["b"]
    assert answer({"text": "봄", "text_pair": "꽃"}) == "b"
    assert answer(["봄", "꽃"]) == ["b", "a"]
    assert answer(["봄", {"text": "꽃"}]) == ["b", "a"]
    assert answer("봄", top_k=2) == ["b", "c"]
    assert answer({"text": "봄"}, top_k=1) == ["b"]
    assert answer(["봄", "꽃"], top_k=2) == [["b", "c"], ["a", "b"]]
    assert answer(["봄"], top_k=None) == [["b", "c", "a"]]


def test_plain_text_and_csv() -> None:
    assert parse("봄".encode(), TEXT).texts == [["봄"]]
    assert parse('inputs\n봄\n"꽃, 잎"\n'.encode(), CSV).texts == [["봄"], ["꽃, 잎"]]
    assert parse("text,text_pair\n봄,꽃\n".encode(), CSV).texts == [["봄", "꽃"]]
    with pytest.raises(UnsupportedMediaType, match="must be application/json, text/plain or"):
        parse(b"", "application/xml")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, 'must be {"inputs"'),
        ({"inputs": []}, "inputs is empty"),
        ({"inputs": ["a"] * 10_001}, "inputs has 10001 texts, at most 10000"),
        ({"inputs": ["a", 1]}, "inputs.1 must be text"),
        ({"inputs": " "}, "inputs is empty"),
        ({"inputs": {"text_pair": "a"}}, "inputs.text is missing"),
        ({"inputs": {"text": "a", "pair": "b"}}, "inputs.pair is not known"),
        ({"inputs": ["a\0"]}, "inputs.0 holds NUL"),
        ({"inputs": "a", "model": "b"}, "model is not known"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 1}}, "parameters.max_new_tokens"),
        ({"inputs": "a", "parameters": {"top_k": 0}}, "top_k"),
        ({"inputs": "a", "parameters": {"top_k": True}}, "top_k"),
        ({"inputs": "a", "parameters": {"function_to_apply": "exp"}}, "function_to_apply"),
        ({"inputs": "a", "parameters": {"truncation": "yes"}}, "truncation must be true or false"),
        ({"inputs": "a", "parameters": {"aggregation_strategy": "simple"}}, "is not known"),
        ({"inputs": "a", "parameters": []}, "parameters"),
    ],
)
def test_refusals(body: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message.replace("{", r"\{")):
        parse(json.dumps(body).encode(), JSON)


def test_a_text_is_not_cut_at_a_comma_without_quotes() -> None:
    with pytest.raises(InvalidRequest, match="row 2 of the CSV has more cells than the header"):
        parse("inputs\n봄\n꽃, 잎\n".encode(), CSV)


@pytest.mark.parametrize("body", ["", "a,b\n1,2\n", "inputs\n"])
def test_csv_without_texts_is_refused(body: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(body.encode(), CSV)
