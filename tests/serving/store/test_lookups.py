"""What a store is asked, and when: with a store that counts and a clock that is set."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from serving.errors import ModelNotInStore, StoreUnavailable, Unavailable, UrlNotAllowed
from serving.store import Lookups, Sources, StoredModel, lookups
from serving.store.folder import FolderStore


class CountingStore:
    """Has what is in `names`; answers once `answers` is set. `now` is the time."""

    location = "fake://"

    def __init__(self, *names: str) -> None:
        self.names, self.asked = set(names), Counter[str]()
        self.broken, self.now = False, 1000.0
        self.asking, self.answers = threading.Semaphore(0), threading.Event()
        self.answers.set()

    def find(self, name: str, handler: str | None = None) -> StoredModel:
        self.asked[name] += 1
        self.asking.release()
        assert self.answers.wait(30)
        if self.broken:
            raise StoreUnavailable("broken")
        if name not in self.names:
            raise ModelNotInStore(f"there is no model {name}")
        return StoredModel(name, f"fake://{name}", "1", 1, "archive")

    def models(self) -> list[StoredModel]:
        return [self.find(name) for name in sorted(self.names)]


@pytest.fixture
def store() -> CountingStore:
    return CountingStore("소월")


@pytest.fixture
def asked(store: CountingStore) -> Iterator[Lookups]:
    asked = Lookups(Sources(cast(Any, store)), lambda: store.now)
    yield asked
    asked.close()


async def is_there(asked: Lookups, name: str) -> bool:
    try:
        return (await asked.find(name)).name == name
    except ModelNotInStore:
        return False


async def test_an_unknown_name_is_looked_up_once_a_second_and_a_broken_store_at_once(
    asked: Lookups, store: CountingStore
) -> None:
    for _ in range(100):
        assert not await is_there(asked, "없음")
    assert store.asked == {"없음": 1}
    store.now += 0.99
    assert not await is_there(asked, "없음")
    assert store.asked == {"없음": 1}
    store.names.add("없음")
    store.now += 0.01
    store.broken = True
    with pytest.raises(StoreUnavailable):
        await asked.find("없음")
    store.broken = False
    assert await is_there(asked, "없음")
    assert await is_there(asked, "없음")


async def test_who_asks_at_the_same_time_shares_a_look_up(
    asked: Lookups, store: CountingStore
) -> None:
    store.answers.clear()
    tasks = [asyncio.create_task(is_there(asked, n)) for n in ("소월", "없음") * 50]
    await asyncio.to_thread(store.asking.acquire)
    tasks[0].cancel()  # one who goes away takes nothing from the others
    store.answers.set()
    found = await asyncio.gather(*tasks[1:])
    assert found == [False, *[True, False] * 49]
    assert store.asked == {"소월": 1, "없음": 1}


async def test_those_who_list_at_the_same_time_or_soon_after_share_a_listing(
    asked: Lookups, store: CountingStore
) -> None:
    store.answers.clear()

    async def listed() -> list[str]:
        return [model.name for model in await asked.models()]

    tasks = [asyncio.create_task(listed()) for _ in range(100)]
    await asyncio.to_thread(store.asking.acquire)
    tasks[0].cancel()
    store.answers.set()
    assert await asyncio.gather(*tasks[1:]) == [["소월"]] * 99
    store.names.add("영랑")
    store.now += 0.99
    assert await listed() == ["소월"]
    assert store.asked == {"소월": 1}
    store.now += 0.01
    assert await listed() == ["소월", "영랑"]
    store.now += 1
    store.broken = True
    with pytest.raises(StoreUnavailable):
        await listed()
    store.broken = False
    assert await listed() == ["소월", "영랑"]


async def test_what_is_remembered_is_bounded(
    asked: Lookups, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MAX_MISSING", 10)
    for number in range(50):
        assert not await is_there(asked, str(number))
    assert len(asked._missing) == 10
    assert not await is_there(asked, "49")
    assert store.asked["49"] == 1
    assert not await is_there(asked, "0")
    assert store.asked["0"] == 2


async def test_a_store_that_hangs_holds_up_nothing_else(
    asked: Lookups, store: CountingStore
) -> None:
    store.answers.clear()
    tasks = [asyncio.create_task(is_there(asked, str(n))) for n in range(lookups.MAX_WAITING)]
    for _ in range(lookups.THREADS):
        await asyncio.to_thread(store.asking.acquire)
    # asyncio's own threads are all free, for unloads and recovery.
    assert await asyncio.gather(*(asyncio.to_thread(int, "1") for _ in range(40))) == [1] * 40
    with pytest.raises(Unavailable, match="256 lookups in the store are waiting") as raised:
        await asked.find("one more")
    assert raised.value.retry_after_s == 1
    with pytest.raises(UrlNotAllowed):  # the answer of a lookup on this machine's disk
        await asked.locate("/없다/소월")
    assert sum(store.asked.values()) == lookups.THREADS
    store.answers.set()
    assert not any(await asyncio.gather(*tasks))


async def test_a_name_that_the_file_system_cannot_have_is_not_there(tmp_path: Path) -> None:
    asked = Lookups(Sources(FolderStore(tmp_path)))
    for look_up in (asked.find, asked.locate):
        with pytest.raises(ModelNotInStore, match="xxx"):
            await look_up("x" * 300)
    asked.close()
