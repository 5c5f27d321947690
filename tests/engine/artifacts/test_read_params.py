"""`.params` files are read as MXNet wrote them, and damaged ones are named in an error."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from engine.artifacts.read_params import read_params
from tests.engine.artifacts import reading
from tests.engine.artifacts.reading import file_of
from tests.engine.models import write_params
from tests.lazy import mx

ARRAYS = {
    "_embed.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "층.0.bias": np.array([-1.5, 0.25], dtype=np.float16),
    "arg:scale": np.ones((1, 2, 2), dtype=np.float32),
    **{
        dtype: np.array([[0, 1, 2], [3, 100, 5]], dtype=dtype)
        for dtype in ("float64", "int32", "int64", "int8", "uint8")
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sound file of small arrays."""
    path = tmp_path / "kogpt2.params"
    mx.nd.save(str(path), {name: mx.nd.array(a, dtype=a.dtype) for name, a in ARRAYS.items()})
    return path


def refused(path: Path) -> str:
    message = reading.refused(path, read_params)
    assert path.name in message
    return message


def test_what_mxnet_saved_is_read_bit_for_bit_and_mapped(file: Path) -> None:
    found = read_params(file)
    assert list(found) == [name.removeprefix("arg:") for name in ARRAYS]
    for name, expected in ARRAYS.items():
        array = found[name.removeprefix("arg:")]
        assert (array.dtype, file_of(array)) == (expected.dtype, file)
        np.testing.assert_array_equal(array, expected)


def test_mxnet_reads_the_files_that_the_tests_write(tmp_path: Path) -> None:
    write_params(tmp_path / "a.params", ARRAYS)
    for name, array in mx.nd.load(str(tmp_path / "a.params")).items():
        np.testing.assert_array_equal(array.asnumpy(), ARRAYS[name])


def test_a_file_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.params"
    for size in range(0, len(whole), 3):
        cut.write_bytes(whole[:size])
        refused(cut)


def packed(form: str, *values: int) -> bytes:
    """A file of one array that begins with these numbers."""
    return struct.pack(f"<QQQI{form}", 0x112, 0, 1, 0xF993FAC9, *values)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too short"),
        (b"\x12\x01", "too short"),
        (b"PK\x03\x04" + b"\0" * 60, "not an MXNet .params file"),
        (struct.pack("<QQQ", 0x112, 0, 2**64 - 1), "cut short"),
        (struct.pack("<QQQI", 0x112, 0, 1, 0xF993FAC8), "no array begins at byte 24"),
        (packed("ii", 0, 33), "33 dimensions"),
        (packed("ii", 0, -1), "-1 dimensions"),
        (packed("iiq", 0, 1, -4), "negative size"),
        (packed("iiqiii", 0, 1, 4, 1, 0, 99), "unknown number type 99"),
        (packed("ii3qiii", 0, 3, *[2**62] * 3, 1, 0, 0), "cut short"),
        (packed("ii3q3iQ", 0, 3, 0, *[2**62] * 2, 1, 0, 0, 0), "no possible shape"),
        (struct.pack("<QQQQ", 0x112, 0, 0, 1), "cut short"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_file_of_something_else_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "other.params"
    path.write_bytes(content)
    assert reason in refused(path)


def test_unnamed_and_sparse_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.params"
    mx.nd.save(str(path), [mx.nd.ones((2,)), mx.nd.ones((3,))])
    assert "2 arrays but 0 names" in refused(path)
    mx.nd.save(str(path), {"a": mx.nd.ones((3, 2)).tostype("row_sparse")})
    assert "sparse" in refused(path)
