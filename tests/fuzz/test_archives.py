"""Archives are unpacked within their bounds or refused: hostile ones made from the parts of tar and
zip, and damaged copies of a model's."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import sys
import zipfile
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import cases
from tests.fuzz.targets import LIMIT, TARGETS, attempt

pytestmark = pytest.mark.slow

CASES = settings(max_examples=100)
MAX_CALLS = 50_000  # of Python and C; what is right takes some thousands

NAMES = st.one_of(
    st.sampled_from(
        ["a.params", "모델/가.params", "code/inference.py", "x" * 99, "a/" * 40 + "f", "한" * 90,
         "../out", "/out", "a/../../out", "a//b", "./a", ".", "..", "", "/", "b\\c", "a\nb",
         ".prepared/x", "..\\out", "code\\._a.py"]
    ),
    st.text(st.sampled_from("ab/.한\0\ud800 "), max_size=12),
)  # fmt: skip
SIZES = st.sampled_from([0, 1, 5, 511, 512, 513, 70_000, LIMIT, 1 << 33, -1, -512, 1 << 62])
NUMBERS = st.one_of(SIZES.map(str), st.sampled_from(["", "x", "1_0", " 5", "9" * 40, "0x10"]))
MODES = st.sampled_from([0, 0o100755, 0o120777, 0o40755, 0o10644])
# Of a member in a zip's list, place and bytes: flags, packing, packed and plain size, extra, start.
FIELDS = st.sampled_from([(8, 2), (10, 2), (20, 4), (24, 4), (30, 2), (42, 4)])
KEYS = st.sampled_from(
    ["path", "linkpath", "size", "comment", "hdrcharset", "GNU.sparse.map", "GNU.sparse.major", ""]
)


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@st.composite
def pax(draw: st.DrawFn) -> bytes:
    """Records of an extended header, some with a wrong length."""
    found = b""
    for _ in range(draw(st.integers(0, 3))):
        key = draw(KEYS)
        value = draw(NUMBERS if key == "size" else NAMES)
        rest = b" " + key.encode() + b"=" + encoded(value) + b"\n"
        length = len(rest) + len(str(len(rest) + 2))
        wrong = draw(st.sampled_from([0, 0, 0, 0, 1, -1, 1000, -length]))
        found += str(length + wrong).encode() + rest
    return found


@st.composite
def header(draw: st.DrawFn) -> bytes:
    """One block and what follows it, which need not be what it says."""
    kind = draw(st.sampled_from([b"0"] * 4 + [bytes([k]) for k in b"\x005 12367LKxgXSDVMz"]))
    data = draw(pax()) if kind in b"xgX" else draw(st.binary(max_size=20))
    if kind in b"LK":
        data = encoded(draw(NAMES)) + b"\0"
    size = len(data) if draw(st.integers(0, 3)) else draw(SIZES)
    digits = (
        b"%011o\0" % size if 0 <= size < 8**11 else b"\xff" + size.to_bytes(11, "big", signed=True)
    )
    block = bytearray(512)
    for at, width, value in (
        (0, 100, encoded(draw(NAMES))),
        (100, 8, b"0000755\0"),
        (124, 12, digits),
        (156, 1, kind),
        (157, 100, encoded(draw(NAMES))),
        (257, 8, draw(st.sampled_from([b"ustar\x0000", b"ustar  \0", b""]))),
        (345, 155, draw(st.sampled_from([b"", "앞".encode(), b"../..", b"/"]))),
    ):
        block[at : at + width] = value[:width].ljust(width, b"\0")
    block[148:156] = b" " * 8
    total = sum(block) if draw(st.integers(0, 9)) else 1
    block[148:156] = b"%06o\0 " % total
    return bytes(block) + data + bytes(-len(data) % 512)


def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the archive with up to four changed places."""
    chance = draw(st.randoms(use_true_random=False))
    for _ in range(draw(st.integers(0, 4))):
        data = cases.damaged(data, chance, [data])
    return data


GNU, PAX, ZIP = cases.seeds("archive")


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        plain = b"".join(draw(st.lists(header(), max_size=8)))
        plain += bytes(draw(st.sampled_from([0, 512, 1024, 10240])))
    else:
        plain = gzip.decompress(draw(st.sampled_from([GNU, PAX])))
    packed = gzip.compress(damaged(draw, plain), 1, mtime=0)
    return damaged(draw, packed) if draw(st.integers(0, 3)) == 0 else packed


@st.composite
def zips(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 2)) == 0:
        return damaged(draw, ZIP)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in draw(st.lists(NAMES, min_size=1, max_size=6)):
            info = zipfile.ZipInfo("x" if "\ud800" in name else name or "x")
            info.external_attr = draw(MODES) << 16
            info.compress_type = draw(st.sampled_from([0, 8, 8, 12, 14]))
            archive.writestr(info, draw(st.sampled_from([b"", b"abc", bytes(5000)])))
    data = bytearray(packed.getvalue())
    at = data.find(b"PK\x01\x02")  # the list of members: fields with other values
    while at >= 0:
        if draw(st.integers(0, 3)) == 0:
            offset, width = draw(FIELDS)
            value = draw(st.sampled_from([0, 1, 8, 99, 5000, 0x0800, 0xFFFF, 0xFFFFFFFE]))
            data[at + offset : at + offset + width] = struct.pack("<I", value)[:width]
        at = data.find(b"PK\x01\x02", at + 1)
    return damaged(draw, bytes(data))


@contextlib.contextmanager
def few_calls() -> Iterator[None]:
    """Fails if more than `MAX_CALLS` are made inside."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert count < MAX_CALLS


@CASES
@given(tars())
def test_any_tar_is_unpacked_within_bounds_or_refused(packed: bytes) -> None:
    with few_calls():
        attempt(TARGETS["archive"], packed, measured=False)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@CASES
@given(zips())
def test_any_zip_is_unpacked_within_bounds_or_refused(packed: bytes) -> None:
    with few_calls():
        attempt(TARGETS["archive"], packed, measured=False)
