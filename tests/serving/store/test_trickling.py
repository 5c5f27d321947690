"""A store that sends a byte at a time: what waits for it ends in time, and nothing else waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving.errors import StoreUnavailable
from serving.store import Cache, Lookups, Sources, Stop, download, lookups, open_store
from tests.serving.store.archives import touch
from tests.serving.store.s3 import ENVIRONMENT
from tests.serving.store.trickling import TricklingStore, trickling_store


@pytest.fixture
def store() -> Iterator[TricklingStore]:
    with trickling_store() as running:
        yield running


@pytest.fixture
def own(store: TricklingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """Of a local store with one model, and the trickling one beside it, which is S3's, too."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": store.url}.items():
        monkeypatch.setenv(name, value)
    touch(tmp_path, "store/시/a.params")
    return Sources(open_store(str(tmp_path / "store")), https_hosts=(store.address,))


async def test_heads_that_trickle_hold_up_no_other_look_up(
    store: TricklingStore, own: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_LIMIT_S", 30.0)
    asked = Lookups(own)
    names = [f"{store.url}/head/{number}.tar.gz" for number in range(lookups.THREADS)]
    slow = [asyncio.ensure_future(asked.locate(name)) for name in names]
    await asyncio.to_thread(store.wait_until, lookups.THREADS)
    assert (await asked.find("시")).name == "시"
    assert (await asked.locate(f"{own.store.location}/시")).name == "시"
    assert len(await asked.models()) == 1
    assert not any(question.done() for question in slow)
    for question in slow:
        question.cancel()
    asked.close()


@pytest.mark.parametrize("scheme", ["https", "s3"])
async def test_a_head_that_trickles_is_given_up_and_frees_its_thread(
    store: TricklingStore, own: Sources, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_LIMIT_S", 0.3)
    name = "봄" if scheme == "s3" else f"{store.url}/head/봄.tar.gz"
    asked = Lookups(Sources(open_store("s3://head/")) if scheme == "s3" else own)
    with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.3 s") as raised:
        await asked.locate(name)
    assert raised.value.retry_after_s == 5
    await asyncio.to_thread(store.wait_until, 0)
    while asked._waiting.total():
        await asyncio.sleep(0.01)
    asked.close()


def test_a_download_that_trickles_is_given_up(
    store: TricklingStore, own: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PACE_S", 0.3)
    monkeypatch.setattr(download, "RANGE_BYTES", 1 << 20)
    model = own.locate(f"{store.url}/body/봄.tar.gz")
    with pytest.raises(StoreUnavailable, match=r"/body/.* sends too slowly: .* at least 524288"):
        Cache(own, tmp_path / "cache", 0, 1 << 30).acquire(model)
    store.wait_until(0)


@pytest.mark.parametrize("kind", ["s3", "https"])
def test_a_download_that_is_given_up_ends_though_a_byte_comes_now_and_then(
    store: TricklingStore,
    own: Sources,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(download, "RANGE_BYTES", 1 << 20)
    sources = Sources(open_store("s3://body/")) if kind == "s3" else own
    model = sources.locate("봄" if kind == "s3" else f"{store.url}/body/봄.tar.gz")
    given_up, cache = Stop(), Cache(sources, tmp_path / "cache", 0, 1 << 30)
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(cache.acquire, model, given_up)
        store.wait_until(download.CONNECTIONS)
        given_up.set()
        with pytest.raises(StoreUnavailable, match="stopped"):
            fetch.result(30)
    store.wait_until(0)
