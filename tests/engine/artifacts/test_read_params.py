"""`.params` files are read as MXNet wrote them, and damaged ones are named in an error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError
from common.mxnet_compat import mx
from engine.artifacts.read_params import read_params
from tests.engine.models import write_params

ARRAYS = {
    "_embed.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "층.0.bias": np.array([-1.5, 0.25], dtype=np.float16),
    "arg:scale": np.ones((1, 2, 2), dtype=np.float32),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sound file of small arrays."""
    path = tmp_path / "kogpt2.params"
    mx.nd.save(str(path), {name: mx.nd.array(a, dtype=a.dtype) for name, a in ARRAYS.items()})
    return path


def refused(path: Path) -> str:
    """Why a file is refused; whatever the reason, it is an ArtifactError that names the file."""
    with pytest.raises(ArtifactError) as caught:
        read_params(path)
    assert path.name in caught.value.message
    return caught.value.message


def test_what_mxnet_saved_is_read_bit_for_bit(file: Path) -> None:
    found = read_params(file)

    assert list(found) == ["_embed.weight", "층.0.bias", "scale"]
    for name, expected in ARRAYS.items():
        array = found[name.removeprefix("arg:")]
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "int64", "uint8"])
def test_every_number_type_of_mxnet_is_read(dtype: str, tmp_path: Path) -> None:
    values = np.array([[0, 1, 2], [3, 100, 5]], dtype=dtype)
    mx.nd.save(str(tmp_path / "a.params"), {"a": mx.nd.array(values, dtype=dtype)})

    found = read_params(tmp_path / "a.params")["a"]

    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


def test_what_gluon_saved_is_read(tmp_path: Path) -> None:
    block = mx.gluon.nn.Dense(3, in_units=2)
    block.initialize(mx.init.Normal(1))
    block.save_parameters(str(tmp_path / "dense.params"))

    found = read_params(tmp_path / "dense.params")

    np.testing.assert_array_equal(found["weight"], block.weight.data().asnumpy())
    np.testing.assert_array_equal(found["bias"], [0, 0, 0])


def test_mxnet_reads_the_files_that_the_tests_write(tmp_path: Path) -> None:
    write_params(tmp_path / "a.params", ARRAYS)

    for name, array in mx.nd.load(str(tmp_path / "a.params")).items():
        np.testing.assert_array_equal(array.asnumpy(), ARRAYS[name])


def test_arrays_are_mapped_and_not_copied(file: Path) -> None:
    array: Any = read_params(file)["_embed.weight"]
    while not isinstance(array, np.memmap):
        array = array.base
    assert Path(array.filename) == file


def test_a_file_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.params"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        refused(cut)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too short"),
        (b"\x12\x01", "too short"),
        (b"PK\x03\x04" + b"\0" * 60, "not an MXNet .params file"),
        (struct.pack("<QQQ", 0x112, 0, 2**64 - 1), "cut short"),
        (struct.pack("<QQQI", 0x112, 0, 1, 0xF993FAC8), "no array begins at byte 24"),
        (struct.pack("<QQQIii", 0x112, 0, 1, 0xF993FAC9, 0, 33), "33 dimensions"),
        (struct.pack("<QQQIii", 0x112, 0, 1, 0xF993FAC9, 0, -1), "-1 dimensions"),
        (struct.pack("<QQQIiiq", 0x112, 0, 1, 0xF993FAC9, 0, 1, -4), "negative size"),
        (
            struct.pack("<QQQIiiqiii", 0x112, 0, 1, 0xF993FAC9, 0, 1, 4, 1, 0, 99),
            "unknown number type 99",
        ),
        (
            struct.pack("<QQQIii3qiii", 0x112, 0, 1, 0xF993FAC9, 0, 3, *[2**62] * 3, 1, 0, 0),
            "cut short",
        ),
        (
            struct.pack("<QQQIii3q3iQ", 0x112, 0, 1, 0xF993FAC9, 0, 3, 0, *[2**62] * 2, 1, 0, 0, 0),
            "no possible shape",
        ),
        (struct.pack("<QQQQ", 0x112, 0, 0, 1), "cut short"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_file_that_holds_something_else_is_refused(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.params"
    path.write_bytes(content)
    assert reason in refused(path)


def test_names_that_do_not_match_the_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "unnamed.params"
    mx.nd.save(str(path), [mx.nd.ones((2,)), mx.nd.ones((3,))])
    assert "2 arrays but 0 names" in refused(path)


def test_a_sparse_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparse.params"
    mx.nd.save(str(path), {"a": mx.nd.ones((3, 2)).tostype("row_sparse")})
    assert "sparse" in refused(path)


def test_a_folder_with_the_name_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "folder.params"
    path.mkdir()
    refused(path)


def test_random_damage_gives_arrays_or_an_artifact_error_and_nothing_else(
    file: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(11)
    whole = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    reasons = []
    for number in range(600):
        damaged = whole.copy()
        for at in rng.integers(0, len(whole), rng.integers(1, 6)):
            damaged[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(0, 256))])
        if number % 3 == 0:
            damaged = damaged[: rng.integers(0, len(whole))]
        path = tmp_path / f"damaged-{number}.params"
        path.write_bytes(damaged.tobytes())
        try:
            read_params(path)
        except ArtifactError as error:
            reasons.append((path.name, error.message))
    assert all(name in message for name, message in reasons)
    assert 50 < len(reasons) < 550
