"""Hostile inputs made from valid ones: changed bytes, JSON with odd values deep in it."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz import deltas, forms, tokenizers

CORPUS = Path(__file__).with_name("corpus")
MOST_BYTES = 60_000
# Files of other tests.
ELSEWHERE = {"torch": [CORPUS.parents[1] / "engine/artifacts/pytorch_model.bin"]}

DEEP: list[Any] = []
for _ in range(700):
    DEEP = [DEEP]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 5, 1e308, -0.0, 2**31, 2**63, 2**64 - 1, -(2**63) - 1, 10**400),
    *("", "가", "\ud800", "\0", "a\r\nX: b", "한" * 3000, "</s>", "../../etc/passwd", "${jndi:x}"),
    *([], {}, [[]], [None], {"": ""}, [1, "가"], [[1], [1, 2]], [0] * 2000, DEEP),
    *("BYTES", "FP32", "NaN", "stream", "1" * 5000, "http://127.0.0.1:1/", "é".encode().hex()),
    # Parts of a tokenizer.json
    *(
        {"type": t}
        for t in ("BPE", "Unigram", "WordPiece", "Replace", "Precompiled", "ByteFallback")
    ),
    {"type": "Replace", "pattern": {"String": ""}, "content": "aa"},
    {"type": "Replace", "pattern": {"Regex": "(a*)*$"}, "content": ""},
    {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Prepend", "prepend": "x" * 10_000},
    {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 40).decode()},
    {"type": "Sequence", "normalizers": [], "pretokenizers": [], "processors": [], "decoders": []},
    {"type": "Strip", "content": "가", "start": 2**40, "stop": 2**40},
    {"content": "<s>", "special": True, "id": 2**31},
]
TOKENS = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\r\n", b'"', b"\\", b"{", b"[" * 1200, b"{{", b"%", b","),
    *(b"9" * 5000, b"-", b"1e999", b"NaN", b"\\ud800", "가".encode(), b"../", b";", b"="),
    *(b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0" * 16),
    *(b"PK\x03\x04", b"\x1f\x8b\x08", b"\x93NUMPY"),
)


# Made by a function.
MADE: dict[str, Callable[[], list[bytes]]] = {
    "delta": deltas.seeds,
    "form": forms.seeds,
    **{name: partial(tokenizers.made, name) for name in tokenizers.NAMES},
}


def seeds(name: str) -> list[bytes]:
    """The target's corpus."""
    if name in MADE:
        return MADE[name]()
    files = ELSEWHERE.get(name) or sorted((CORPUS / name).iterdir())
    return [path.read_bytes() for path in files]


def case(rng: random.Random, known: Sequence[bytes]) -> bytes:
    """Make an input from known ones of its format."""
    data = rng.choice(known)
    if rng.random() < 0.5:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            pass
        else:
            for _ in range(rng.randint(1, 3)):
                value = changed(value, rng)
            text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
            data = text.encode("utf-8", "surrogatepass")
            if rng.random() < 0.7:
                return data[:MOST_BYTES]
    for _ in range(rng.randint(1, 6)):
        data = damaged(data, rng, known)
    return data[:MOST_BYTES]


def damaged(data: bytes, rng: random.Random, known: Sequence[bytes]) -> bytes:
    """The data changed in one place."""
    at = rng.randint(0, len(data))
    to = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64)))
    match rng.randrange(8):
        case 0 | 1 if at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at] + rng.randbytes(to - at) + data[to:]
        case 3:
            return data[:at] + data[to:]
        case 4:
            return data[:at] + data[at:to] * rng.choice((2, 50, 1000)) + data[to:]
        case 5:
            return data[:at]
        case 6:
            other = rng.choice(known)
            return data[:at] + other[rng.randint(0, len(other)) :]
        case _:
            return data[:at] + rng.choice(TOKENS) + data[to:]


def changed(value: Any, rng: random.Random) -> Any:
    """The value with one of its values replaced, removed, repeated or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        match rng.randrange(10):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, str(rng.choice(ODD))[:300]: value[key]}
            case _:
                return {**value, key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value + value[at:] * rng.choice((1, 100))
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)
