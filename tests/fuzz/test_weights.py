"""Readers of weights take or refuse hostile files made from the parts of a format.
`test_parsers.py` has damaged copies of real files."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ArtifactError
from engine.artifacts.files import parse_json
from tests.engine.artifacts.torch_files import (
    Saved,
    number,
    numbers,
    state_dict,
    tensor,
    text,
    write,
)
from tests.fuzz.cases import ELSEWHERE, damaged
from tests.fuzz.targets import TARGETS, attempt

pytestmark = pytest.mark.slow

CASES = settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Numbers at which sizes, signs and products overflow.
POWERS = [(1 << e) + d for e in (8, 31, 32, 62, 63) for d in (-1, 0, 1)]
EDGES = st.sampled_from([*(0, 1, 2, 3, 7, 32, 33, 200, 255), *POWERS])
NATURALS = st.one_of(EDGES, st.integers(0, 40))
INTEGERS = st.one_of(NATURALS, NATURALS.map(lambda n: -n))
NAMES = st.one_of(
    st.sampled_from(["a", "가", "", "arg:a", "h.0.ln_1.weight", "\ud800", "x" * 2000]), st.text()
)
ARRAYS = st.tuples(
    st.sampled_from([0xF993FAC9, 0xF993FACA, 0xF993FAC8, 0]),
    st.integers(-1, 2),
    st.lists(INTEGERS, max_size=34),
    st.integers(-1, 8),
    st.binary(max_size=40),
)


@CASES
@given(
    st.lists(ARRAYS, max_size=3),
    st.lists(NAMES, max_size=3),
    st.tuples(st.one_of(st.just(0), EDGES), st.one_of(st.just(0), EDGES)),
)
def test_params(arrays: list[Any], names: list[str], counts: tuple[int, int]) -> None:
    content = struct.pack("<QQQ", 0x112, 0, (len(arrays) + counts[0]) % 2**64)
    for magic, storage, shape, code, data in arrays:
        content += struct.pack("<IiI", magic, storage, len(shape))
        content += b"".join(struct.pack("<q", (n + 2**63) % 2**64 - 2**63) for n in shape)
        content += struct.pack("<iii", 1, 0, code) + data
    content += struct.pack("<Q", (len(names) + counts[1]) % 2**64)
    for name in names:
        encoded = name.encode("utf-8", "surrogatepass")
        content += struct.pack("<Q", len(encoded)) + encoded
    attempt(TARGETS["params"], content)


JSONS = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), NAMES),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)
ENTRIES = st.one_of(
    JSONS,
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["F32", "BF16", "F64", "U8", "F8"]), JSONS),
            "shape": st.one_of(st.lists(INTEGERS, max_size=40), JSONS),
            "data_offsets": st.one_of(st.lists(NATURALS, min_size=2, max_size=2), JSONS),
        }
    ),
)


@CASES
@given(
    header=st.dictionaries(NAMES, ENTRIES, max_size=4),
    length=st.one_of(st.none(), EDGES),
    data=st.binary(max_size=64),
)
def test_safetensors(header: Any, length: int | None, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    size = (len(encoded) if length is None else length % 2**64).to_bytes(8, "little")
    attempt(TARGETS["safetensors"], size + encoded + bytes(16) + data)


with zipfile.ZipFile(*ELSEWHERE["torch"]) as archive:
    REAL_PICKLE = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
SAVED = st.builds(
    Saved,
    shape=st.lists(INTEGERS, max_size=40),
    strides=st.lists(INTEGERS, max_size=40),
    offset=INTEGERS,
    count=INTEGERS,
    key=st.sampled_from(["0", "1", "../0", ""]),
    kind=st.sampled_from(["FloatStorage", "BFloat16Storage", "ByteStorage", "Size"]),
)
SQUARE = st.integers(0, 33).map(lambda n: Saved([1] * n, [1] * n))
OPCODES = st.one_of(
    st.sampled_from(
        [
            *(bytes([code]) for code in b"(tus}])aeRQb02N\x94\x93\x88.cP\x85\x87"),
            *(b"h\x00", b"q\x00", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f"),
            *(b"\x96" + b"\xff" * 8, b"\x8e" + b"\x7f" * 8, b"\x95" + b"\xff" * 8),
            *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n"),
            *(b"cos\nsystem\n", b"I" + b"9" * 5000 + b"\n", b"X\xff\xff\xff\x7f"),
        ]
    ),
    NAMES.map(text),
    INTEGERS.map(number),
    st.lists(NATURALS, max_size=4).map(numbers),
    SAVED.map(tensor),
    SQUARE.map(tensor),
    st.binary(max_size=4),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch") / "any.bin"


@CASES
@given(
    chance=st.randoms(use_true_random=False),
    saved=st.dictionaries(NAMES, st.one_of(SAVED, SQUARE), max_size=3),
    opcodes=st.lists(OPCODES, max_size=20),
    how=st.sampled_from(["state_dict", "opcodes", "damaged"]),
)
def test_torch(
    file: Path, chance: random.Random, saved: Any, opcodes: list[bytes], how: str
) -> None:
    pickled = state_dict(saved)
    if how == "opcodes":
        pickled = b"\x80\x02" + b"".join(opcodes) + b"."
    elif how == "damaged":
        pickled = damaged(REAL_PICKLE, chance, [REAL_PICKLE])
    attempt(TARGETS["torch"], write(file, pickled).read_bytes())


@CASES
@given(st.lists(st.sampled_from(["\\", "\\\\", "\\ud800", "\\uDC00", "\\u", "d800", "가", '\\"'])))
def test_half_characters_are_found_where_json_finds_them(parts: list[str]) -> None:
    content = f'{{"a": "{"".join(parts)}"}}'
    try:
        value = json.loads(content)["a"]
    except ValueError:
        return
    half = any(0xD800 <= ord(c) <= 0xDFFF for c in value)
    with pytest.raises(ArtifactError, match="half") if half else contextlib.nullcontext():
        parse_json(content.encode(), "a.json")
