"""The Open Inference Protocol's requests of texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.media_types import BINARY, HEADER_SIZE
from handlers.text import v2

TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["나는"]}


def body(**fields: Any) -> bytes:
    return json.dumps({"inputs": [TEXT], **fields}).encode()


@pytest.mark.parametrize("plain", ['"datatype" 은?', '{"datatype": ', '"inputs" "datatype"'])
def test_a_text_that_mentions_the_protocol_is_a_text(plain: str) -> None:
    assert v2.parse(plain.encode(), "text/plain") is None


@pytest.mark.parametrize("separator", [";", "; "])
def test_the_length_of_the_json_is_a_parameter_of_the_content_type(separator: str) -> None:
    tensor = {**TEXT, "data": None, "parameters": {"binary_data_size": 10}}
    header = json.dumps({"inputs": [tensor]}).encode()
    kind = f"{BINARY}{separator}{HEADER_SIZE}={len(header)}"
    parsed = v2.parse(header + b"\6\0\0\0" + "나는".encode(), kind)
    assert parsed is not None
    assert parsed[1].inputs == "나는"


@pytest.mark.parametrize("given", [body(id="\ud800"), body(parameters={"\ud800": 1})])
def test_half_a_surrogate_pair_is_refused(given: bytes) -> None:
    kind = f"{BINARY};{HEADER_SIZE}={len(given)}"
    with pytest.raises(InvalidRequest, match="half a surrogate pair"):
        v2.parse(given, kind)
    assert v2.parse(given, "application/json") is None  # `handlers.payload` refuses it


def test_an_answer_has_the_requests_id() -> None:
    parsed = v2.parse(body(id="봄", outputs=[{"name": "generated_text"}]), None)
    assert parsed is not None
    sequences = [{"generated_text": "꽃", "tokens": 1, "finish_reason": "stop"}]
    answer = json.loads(v2.answer(parsed[0], sequences, "시")[0])
    assert answer == {
        "model_name": "시",
        "model_version": "1",
        "id": "봄",
        "outputs": [{"name": "generated_text", "datatype": "BYTES", "shape": [1], "data": ["꽃"]}],
    }
