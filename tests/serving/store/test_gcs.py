"""`gs://` against an emulator of Google's storage; .ci/run has what a driver needs
(requirements/store.txt)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.errors import ArtifactChanged, ModelNotInStore, StoreUnavailable
from serving.store import Cache, StoreSettings, drivers, open_store
from tests.serving.store.emulator import emulator
from tests.serving.store.s3 import archive

pytest.importorskip("gcsfs", reason="needs gcsfs: pip install -r requirements/store.txt")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the drivers' own
]
EMULATOR = Path(sys.executable).with_name("gcp-storage-emulator")
LOCATION = "gs://models/kogpt2/"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    command = [str(EMULATOR), "start", "--in-memory", "--host", "127.0.0.1"]
    with emulator([*command, "--default-bucket", "models"], "--port") as port:
        yield port


@pytest.fixture
def bucket(port: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    import fsspec

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    files = fsspec.filesystem("gs", skip_instance_cache=True, use_listings_cache=False)
    for path in files.find("models"):
        files.rm(path)
    return files


def test_models_of_google_are_offered_and_fetched(bucket: Any, tmp_path: Path) -> None:
    data = archive({"a.params": bytes(range(256)) * 40_000}, level=0)
    bucket.pipe_file("models/kogpt2/소월.tar.gz", data)
    bucket.pipe_file("models/kogpt2/팀/동주/a.params", b"x")
    bucket.pipe_file("models/elsewhere/a.tar.gz", data)
    store = open_store(LOCATION)
    assert [m.name for m in store.models()] == ["소월", "팀/동주"]
    cache = Cache(StoreSettings(LOCATION, tmp_path, 0, 4 << 30, (), ()))
    for model in store.models():
        assert store.find(model.name) == model
        assert (cache.acquire(model).path / "a.params").exists()
    fetched = cache.acquire(store.find("소월")).path / "a.params"
    assert fetched.read_bytes() == bytes(range(256)) * 40_000
    with pytest.raises(ModelNotInStore, match="없음"):
        store.find("없음")


def test_versions_of_google_do_not_mix(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe_file("models/kogpt2/a.tar.gz", archive({"a.params": b"old"}))
    cache, old = (
        Cache(StoreSettings(LOCATION, tmp_path, 0, 4 << 30, (), ())),
        open_store(LOCATION).find("a"),
    )
    bucket.pipe_file("models/kogpt2/a.tar.gz", archive({"a.params": b"new"}))
    with pytest.raises(ArtifactChanged):
        cache.acquire(old)
    path = cache.acquire(open_store(LOCATION).find("a")).path
    assert (path / "a.params").read_bytes() == b"new"


def test_a_google_store_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "CALL_S", 1.0)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        open_store(LOCATION).find("a")
    assert time.monotonic() - started < 45  # without the drivers' own retries
