"""Mapped files are read into memory before a step computes with them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.backends import page_cache
from engine.backends.page_cache import PAGE, Span, advise_cold, read_in
from tests.engine.engines import WAIT_S

PAGES = 1000
LENGTH = PAGES * PAGE - 7


@pytest.fixture
def span(tmp_path: Path) -> Iterator[Span]:
    """A mapped file of which nothing is in memory; skips where the folder itself is memory."""
    path = tmp_path / "가중치.bin"
    path.write_bytes(os.urandom(LENGTH))
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    if not missing((mapped.ctypes.data, LENGTH)):
        pytest.skip("a folder in memory")
    yield mapped.ctypes.data, LENGTH
    del mapped  # it was mapped until now


def missing(span: Span) -> int:
    return sum(length for _, length in page_cache._missing(*span))


def resident(span: Span) -> int:
    """Bytes of it that count as this process's."""
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if line.startswith(f"{span[0]:x}-"):
                return next(int(s.split()[1]) << 10 for s in smaps if s.startswith("Rss:"))
    raise AssertionError("it is not mapped")


@pytest.mark.parametrize("advice", [page_cache.MADV_POPULATE_READ, 9999])  # of an older kernel
def test_what_is_not_in_memory_is_read_once(
    span: Span, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(page_cache, "MADV_POPULATE_READ", advice)
    assert missing(span) == read_in([span]) == LENGTH
    assert missing(span) == read_in([span]) == 0


def test_cold_pages_stay_while_the_kernel_has_no_other_use_for_them(span: Span) -> None:
    read_in([span])
    advise_cold([span])
    assert missing(span) == read_in([span]) == 0
    assert resident(span) == PAGES * PAGE


def test_only_the_parts_are_waited_for(span: Span) -> None:
    begin, _ = span
    parts = [(begin + 100 * PAGE, 10 * PAGE), (begin + 900 * PAGE, 100 * PAGE - 7)]
    assert read_in(parts) == 110 * PAGE - 7
    assert [missing(part) for part in parts] == [0, 0]


def test_one_reads_at_a_time_and_what_is_in_memory_is_not_waited_for(span: Span) -> None:
    there = (span[0], 10 * PAGE)
    read_in([there])
    left = missing(span)
    with ThreadPoolExecutor(1) as pool:
        with page_cache._disk:
            rest = pool.submit(read_in, [span])
            assert read_in([there]) == 0
            assert not rest.done()
            assert missing(span) == left
        assert rest.result(WAIT_S) == left


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """As when it was cut short: a step that touched it would end the engine."""
    path = tmp_path / "cut"
    path.write_bytes(bytes(2 * PAGE))
    with path.open("rb+") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        file.truncate(PAGE)
        with pytest.raises(OSError, match=r"Bad address|Input/output error"):
            read_in([(mapped.ctypes.data, 2 * PAGE)])
