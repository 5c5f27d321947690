"""A store that sends a byte at a time: what waits for it ends in time, and nothing else waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.errors import StoreUnavailable
from serving.store import Cache, Lookups, Stop, StoreSettings, download, locate, lookups, open_store
from tests.serving.store.archives import touch
from tests.serving.store.s3 import ENVIRONMENT, open_cache, settings
from tests.serving.store.trickling import TricklingStore, trickling_store


@pytest.fixture
def store() -> Iterator[TricklingStore]:
    with trickling_store() as running:
        yield running


@pytest.fixture
def own(store: TricklingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreSettings:
    """Settings of a local store with one model, and of the trickling one beside it, also S3's."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": store.url}.items():
        monkeypatch.setenv(name, value)
    touch(tmp_path, "store/시/a.params")
    return settings(
        tmp_path / "cache", location=str(tmp_path / "store"), https_hosts=(store.address,)
    )


async def test_heads_that_trickle_end_in_time_and_hold_up_no_other_look_up(
    store: TricklingStore, own: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_LIMIT_S", 30.0)
    asked = Lookups(open_store(own.location), own)
    names = [f"{store.url}/head/{number}.tar.gz" for number in range(lookups.THREADS)]
    slow = [asyncio.ensure_future(asked.locate(name)) for name in names]
    await asyncio.to_thread(store.wait_until, lookups.THREADS)
    assert (await asked.find("시")).name == "시"
    assert (await asked.locate(f"{own.location}/시")).name == "시"
    assert len(await asked.models()) == 1
    assert not any(question.done() for question in slow)
    for question in slow:
        question.cancel()
    asked.close()

    monkeypatch.setattr(lookups, "LOOKUP_LIMIT_S", 0.3)
    again = Lookups(open_store(own.location), own)

    with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.3 s") as raised:
        await again.locate(f"{store.url}/head/봄.tar.gz")
    assert raised.value.retry_after_s == 5
    again.close()


@pytest.mark.parametrize("scheme", ["https", "s3"])
async def test_a_thread_whose_question_is_given_up_is_free(
    store: TricklingStore, own: StoreSettings, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_LIMIT_S", 0.3)
    location = "s3://head/" if scheme == "s3" else own.location
    name = "봄" if scheme == "s3" else f"{store.url}/head/봄.tar.gz"
    asked = Lookups(open_store(location), own)
    with pytest.raises(StoreUnavailable):
        await asked.locate(name)
    await asyncio.to_thread(store.wait_until, 0)
    while asked._waiting.total():
        await asyncio.sleep(0.01)
    asked.close()


def test_a_download_that_trickles_is_given_up(
    store: TricklingStore, own: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PACE_S", 0.3)
    monkeypatch.setattr(download, "RANGE_BYTES", 1 << 20)
    model = locate(f"{store.url}/body/봄.tar.gz", None, own)
    with pytest.raises(StoreUnavailable, match=r"/body/.* sends too slowly: .* at least 524288"):
        Cache(own, None).acquire(model)
    store.wait_until(0)


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_a_download_that_is_given_up_ends_though_a_byte_comes_now_and_then(
    store: TricklingStore, own: StoreSettings, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(download, "RANGE_BYTES", 1 << 20)
    given_up, cache = Stop(), Cache(own, None)
    if kind == "s3":
        cache = open_cache(own.cache_dir, location="s3://body/")
        model = open_store("s3://body/").find("봄")
    else:
        model = locate(f"{store.url}/body/봄.tar.gz", None, own)
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(cache.acquire, model, given_up)
        store.wait_until(download.CONNECTIONS)
        given_up.set()
        with pytest.raises(StoreUnavailable, match="stopped"):
            fetch.result(30)
    store.wait_until(0)
