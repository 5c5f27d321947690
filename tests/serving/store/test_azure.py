"""`abfs://` against Azurite, Microsoft's own emulator of Azure's storage.

.ci/npm has it, and .ci/run what a driver needs (requirements/store.txt).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.errors import ArtifactChanged, ModelNotInStore, StoreAccessDenied, StoreUnavailable
from serving.store import Cache, StoreSettings, drivers, open_store
from tests.serving.store.emulator import emulator
from tests.serving.store.s3 import archive

pytest.importorskip("adlfs", reason="needs adlfs: pip install -r requirements/store.txt")
if shutil.which("azurite-blob") is None:
    pytest.skip("needs azurite-blob on PATH: .ci/npm azurite", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the drivers' own
]
LOCATION = "abfs://models/kogpt2/"
# The account that every Azurite has; its key is public.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def connection(port: int, key: str = KEY) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
    )


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    command = ["azurite-blob", "--blobHost", "127.0.0.1", "--silent", "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    with emulator(command, "--blobPort") as port:
        yield port


@pytest.fixture
def container(port: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    import fsspec

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(port))
    files = fsspec.filesystem("abfs", connection_string=connection(port))
    if files.exists("models"):
        files.rm("models", recursive=True)
    files.mkdir("models")
    return files


def test_models_of_azure_are_offered_and_fetched(container: Any, tmp_path: Path) -> None:
    data = archive({"a.params": bytes(range(256)) * 40_000}, level=0)
    container.pipe_file("models/kogpt2/소월.tar.gz", data)
    container.pipe_file("models/kogpt2/팀/동주/a.params", b"x")
    store = open_store(LOCATION)
    assert [m.name for m in store.models()] == ["소월", "팀/동주"]
    cache = Cache(StoreSettings(LOCATION, tmp_path, 0, 4 << 30, (), ()))
    for model in store.models():
        assert store.find(model.name) == model
        assert (cache.acquire(model).path / "a.params").exists()
    with pytest.raises(ModelNotInStore, match="없음"):
        store.find("없음")


def test_versions_of_azure_do_not_mix(container: Any, tmp_path: Path) -> None:
    container.pipe_file("models/kogpt2/a.tar.gz", archive({"a.params": b"old"}))
    cache, old = (
        Cache(StoreSettings(LOCATION, tmp_path, 0, 4 << 30, (), ())),
        open_store(LOCATION).find("a"),
    )
    container.pipe_file("models/kogpt2/a.tar.gz", archive({"a.params": b"new"}))
    with pytest.raises(ArtifactChanged):
        cache.acquire(old)
    path = cache.acquire(open_store(LOCATION).find("a")).path
    assert (path / "a.params").read_bytes() == b"new"


def test_a_wrong_key_and_a_wrong_address_are_told_apart(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = KEY.replace("Eby8", "Eby9")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(port, wrong))
    with pytest.raises(StoreAccessDenied, match="access was denied"):
        open_store(LOCATION).find("a")
    monkeypatch.setattr(drivers, "CALL_S", 1.0)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(1))
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        open_store(LOCATION).find("a")
    assert time.monotonic() - started < 45  # without the drivers' own retries
