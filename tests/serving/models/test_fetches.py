"""Fetches that hang: with a cache that waits until it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from serving.models.fetches import DOWNLOADS_AT_ONCE, Fetches
from serving.store import Fetched, StoredModel

STORED = StoredModel("소월", "s3://models/소월.tar.gz", "1", 1, "archive")


class HangingCache:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.here: set[str] = set()  # names of what does not hang
        self.asked, self.answers = threading.Semaphore(0), threading.Event()
        self.most = self.now = self.released = 0
        self._lock = threading.Lock()

    def holds(self, stored: StoredModel) -> bool:
        return stored.name in self.here

    def acquire(self, stored: StoredModel, given_up: threading.Event) -> Fetched:
        if stored.name in self.here:
            return Fetched(self._folder, hit=True)
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.asked.release()
        assert self.answers.wait(60)
        with self._lock:
            self.now -= 1
        return Fetched(self._folder, hit=True)

    def release(self, path: Path, *, discard: bool = False) -> None:
        with self._lock:
            self.released += 1


@pytest.mark.parametrize("cached", [False, True])
async def test_downloads_that_hang_hold_up_nothing_else(tmp_path: Path, cached: bool) -> None:
    cache = HangingCache(tmp_path)
    fetches = Fetches(cast(Any, cache))
    here = dataclasses.replace(STORED, name="영랑")
    cache.here.add("영랑")
    if not cached:
        here = dataclasses.replace(here, url="/store/영랑", kind="folder")
    tasks = [asyncio.create_task(fetches.manifest_name(STORED, 60)) for _ in range(60)]
    for _ in range(DOWNLOADS_AT_ONCE):
        assert await asyncio.to_thread(cache.asked.acquire, True, 30)
    assert await fetches.manifest_name(here, 60) is None
    # What unloads and recovery use is free.
    assert await asyncio.gather(*(asyncio.to_thread(int, "1") for _ in range(60))) == [1] * 60
    tasks[0].cancel()  # its thread goes on, and what it brings is given back
    cache.answers.set()
    assert await asyncio.gather(*tasks[1:]) == [None] * 59
    while cache.released < 61:
        await asyncio.sleep(0)
    assert cache.most == DOWNLOADS_AT_ONCE
