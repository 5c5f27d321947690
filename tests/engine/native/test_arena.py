"""Pages of keys and values: shared, copied where rows part, and given back."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from common.errors import OutOfMemory
from engine.native.arena import Arena, NativeRow
from engine.native.library import PAGE_TOKENS
from tests.engine.backends.running import address_space, status_bytes

PAGE = 1 << 16


def row_of(arena: Arena, length: int) -> NativeRow:
    row = NativeRow(arena, 64 * PAGE_TOKENS)
    row.reserve(length)
    row.length = length
    return row


def content(arena: Arena, page: int) -> np.ndarray:
    return np.frombuffer(arena._memory, np.uint8, PAGE, page * PAGE)


def used(arena: Arena) -> int:
    return int(np.count_nonzero(arena._references))


def test_a_row_takes_and_gives_back_pages_of_sixteen_tokens() -> None:
    arena = Arena(PAGE)
    row = row_of(arena, PAGE_TOKENS)
    assert (len(row.pages), row.num_bytes) == (1, PAGE)
    row.reserve(100)
    row.length = 100
    pages = row.pages
    row.truncate(33)
    assert (row.length, len(row.pages), used(arena)) == (33, 3, 3)
    row.truncate(0)
    assert used(arena) == 0
    assert sorted(row_of(arena, 100).pages) == sorted(pages)  # before new ones


def test_rows_that_begin_alike_share_whole_pages_and_copy_the_last() -> None:
    arena = Arena(PAGE)
    source = row_of(arena, 40)
    content(arena, source.pages[2])[:] = 7
    row = NativeRow(arena, 1024)
    row.begin_with(source, 35)
    assert (row.length, row.pages[:2]) == (35, source.pages[:2])
    assert row.pages[2] not in source.pages
    assert (content(arena, row.pages[2]) == 7).all()
    content(arena, row.pages[2])[:] = 8
    assert (content(arena, source.pages[2]) == 7).all()
    source.truncate(0)
    assert used(arena) == 3  # the other row still has its pages
    row.truncate(0)
    assert used(arena) == 0


def test_memory_of_free_pages_goes_back_to_the_system() -> None:
    arena = Arena(PAGE)
    rows = [row_of(arena, 64 * PAGE_TOKENS) for _ in range(8)]
    for row in rows:
        for page in row.pages:
            content(arena, page)[:] = 1
    before = status_bytes("RssAnon")
    rows[3].truncate(0)  # a hole
    rows[7].truncate(0)  # the end
    arena.trim()
    assert before - status_bytes("RssAnon") > 1.9 * 64 * PAGE
    assert (content(arena, rows[0].pages[5]) == 1).all()
    again = row_of(arena, 64 * PAGE_TOKENS)
    assert max(again.pages) < 8 * 64
    assert not content(arena, again.pages[0]).any()


def test_memory_can_be_trimmed_while_all_pages_are_in_use() -> None:
    arena = Arena(1 << 30)
    pages = arena.take(arena._count)
    arena.trim()
    arena.release(pages)
    arena.trim()
    assert arena.take(2) == [0, 1]


def test_neighboring_free_pages_are_returned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, calls = Arena(mmap.PAGESIZE), list[tuple[int, int]]()
    monkeypatch.setattr("engine.native.arena.advise_dontneed", lambda *call: calls.append(call))
    arena.take(300)
    arena.release([*range(249, 199, -1), *range(100)])
    arena.trim()
    pages = [((a - arena.address) // mmap.PAGESIZE, n // mmap.PAGESIZE) for a, n in calls]
    assert pages == [(0, 100), (200, 50), (300, arena._count - 300)]


def test_a_page_is_copied_without_other_memory() -> None:
    arena = Arena(96 << 20)
    [page] = arena.take(1)
    arena._memory[arena.page_bytes - 1] = 7
    with address_space(64 << 20):
        new = arena.copy(page)
    assert arena._memory[(new + 1) * arena.page_bytes - 1] == 7
    assert used(arena) == 2


def test_more_pages_than_there_are_addresses_for_are_refused() -> None:
    arena = Arena(1 << 30)
    with pytest.raises(OutOfMemory, match="pages of keys and values are in use"):
        arena.take(1 << 20)
    assert used(arena) == 0
