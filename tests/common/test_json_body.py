"""Bodies in JSON, whose values are counted before they are made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.json_body import read_json, read_text


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"{}," * 100 + b"0]",
        b"[" + b"[]," * 100 + b"0]",
        b"[" + b"[{}]," * 50 + b"0]",
        b"[" + b"1," * 100 + b"0]",
        b"[" + b'"",' * 100 + b"0]",
        ('{"' + '": {"봄'.join("a" * 101) + '": 1' + "}" * 101).encode(),
        b'[{"a": ",[{:"},' + b'{"":0},' * 50 + b"0]",
        b'["\\"",' + b'"\\\\",' * 100 + b"0]",
    ],
)
def test_values_are_counted_before_they_are_made(body: bytes) -> None:
    for sent in (body, bytearray(body), body.decode()):
        with pytest.raises(InvalidRequest, match="more than 100 values"):
            read_json(sent, 100)


@pytest.mark.parametrize(
    "value",
    [
        list(range(99)),
        {f"{i}": i for i in range(49)},
        {
            "inputs": "나 보기가, [역겨워] {가실} 때에는: " * 100,
            "parameters": {"stop": ['"', "\\"]},
        },
        "," * 1000,
        ['\\"[' * 100] * 40,
    ],
)
def test_delimiters_in_strings_are_no_values(value: Any) -> None:
    for ascii_only in (True, False):
        assert read_json(json.dumps(value, ensure_ascii=ascii_only), 100) == value


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    for sent in (b'\xef\xbb\xbf{"inputs": "\xeb\xb4\x84"}', '\ufeff{"inputs": "봄"}'):
        assert read_json(sent, 100) == {"inputs": "봄"}
        assert read_text(sent) == '{"inputs": "봄"}'
    assert read_json('"\ufeff봄"') == "\ufeff봄"
    with pytest.raises(InvalidRequest, match=r"generation\.json is not UTF-8"):
        read_json("{}".encode("utf-16"), source="generation.json")


def test_invalid_json_is_refused_however_long() -> None:
    for body in (
        b'["' + b"," * 1000,
        b'[",' + b'\\"' * 1000,
        b",\xff" * 1000,
        b"," * 100 + b'"a"' * 9999,
    ):
        with pytest.raises(InvalidRequest, match=r"not JSON|not UTF-8|more than 100"):
            read_json(body, 100)
