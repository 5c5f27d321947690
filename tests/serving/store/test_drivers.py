"""`abfs://` against Azurite, Microsoft's own emulator of Azure's storage, and `gs://` against an
emulator of Google's. .ci/run has the drivers (requirements/store.txt) and the emulators."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serving.errors import ArtifactChanged, ModelNotInStore, StoreAccessDenied, StoreUnavailable
from serving.store import Cache, drivers, open_store
from tests.e2e.server import free_port
from tests.e2e.stores import SHORT, packed, serving, small, text
from tests.processes import eventually
from tests.serving.store.s3 import archive, open_cache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the drivers' own
]
# The account that every Azurite has; its key is public.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = ["azurite-blob", "--blobHost", "127.0.0.1", "--silent", "--inMemoryPersistence"]
AZURITE += ["--skipApiVersionCheck", "--disableTelemetry"]
GOOGLE = [str(Path(sys.executable).with_name("gcp-storage-emulator")), "start", "--in-memory"]
GOOGLE += ["--host", "127.0.0.1", "--default-bucket", "models"]


def azure(port: int, key: str = KEY) -> tuple[str, str]:
    return "AZURE_STORAGE_CONNECTION_STRING", (
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
    )


def google(port: int) -> tuple[str, str]:
    return "STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}"


@dataclass(frozen=True)
class Kind:
    scheme: str
    driver: str
    command: list[str]
    port_option: str
    variable: Any  # the variable that names a port, and its value

    @property
    def location(self) -> str:
        return f"{self.scheme}://models/kogpt2/"

    def missing(self) -> str:
        if importlib.util.find_spec(self.driver) is None:
            return f"needs {self.driver}: pip install -r requirements/store.txt"
        found = shutil.which(self.command[0])
        return "" if found else f"needs {self.command[0]} on PATH: .ci/npm azurite"


KINDS = [
    Kind("abfs", "adlfs", AZURITE, "--blobPort", azure),
    Kind("gs", "gcsfs", GOOGLE, "--port", google),
]


@pytest.fixture(scope="module", params=KINDS, ids=["azure", "google"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if reason := found.missing():
        pytest.skip(reason)
    return found


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def port(kind: Kind) -> Iterator[int]:
    """The port of the emulator, a process of its own."""
    port = free_port()
    process = subprocess.Popen([*kind.command, kind.port_option, str(port)])
    try:
        eventually(lambda: _answers(port))
        yield port
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def files(kind: Kind, port: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emulator's, by fsspec, with an empty bucket."""
    import fsspec

    variable, value = kind.variable(port)
    monkeypatch.setenv(variable, value)
    options = {"connection_string": value} if kind.scheme == "abfs" else {}
    files = fsspec.filesystem(
        kind.scheme, skip_instance_cache=True, use_listings_cache=False, **options
    )
    if not files.exists("models"):
        files.mkdir("models")
    for path in files.find("models"):
        files.rm(path)
    return files


def cache(kind: Kind, folder: Path) -> Cache:
    return open_cache(folder, kind.location, max_bytes=0)


def test_models_are_offered_and_fetched(kind: Kind, files: Any, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    data = archive({"a.params": content}, level=0)
    files.pipe_file("models/kogpt2/소월.tar.gz", data)
    files.pipe_file("models/kogpt2/팀/동주/a.params", b"x")
    files.pipe_file("models/elsewhere/a.tar.gz", data)
    store = open_store(kind.location)
    assert [m.name for m in store.models()] == ["소월", "팀/동주"]
    for model in store.models():
        assert store.find(model.name) == model
        fetched = cache(kind, tmp_path).acquire(model).path / "a.params"
        assert fetched.read_bytes() == (content if model.name == "소월" else b"x")
    with pytest.raises(ModelNotInStore, match="없음"):
        store.find("없음")


def test_a_server_answers_with_a_model_of_the_store(
    kind: Kind, files: Any, port: int, tmp_path: Path
) -> None:
    archive = packed(small(tmp_path / "소월"), tmp_path / "소월.tar.gz")
    files.pipe_file("models/kogpt2/소월.tar.gz", archive.read_bytes())
    variable, value = kind.variable(port)
    with serving(tmp_path / "server", **{"MODEL_STORE": kind.location, variable: value}) as server:
        assert text(server.predict("소월", SHORT))


def test_versions_do_not_mix(kind: Kind, files: Any, tmp_path: Path) -> None:
    files.pipe_file("models/kogpt2/a.tar.gz", archive({"a.params": b"old"}))
    old = open_store(kind.location).find("a")
    files.pipe_file("models/kogpt2/a.tar.gz", archive({"a.params": b"new"}))
    with pytest.raises(ArtifactChanged):
        cache(kind, tmp_path).acquire(old)
    path = cache(kind, tmp_path).acquire(open_store(kind.location).find("a")).path
    assert (path / "a.params").read_bytes() == b"new"


def test_a_store_that_is_away_is_unavailable(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within our own limit: the drivers' retries take minutes."""
    monkeypatch.setattr(drivers.DriverBucket._call, "__defaults__", (1.0,))
    monkeypatch.setenv(*kind.variable(1))
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        open_store(kind.location).find("a")


def test_a_wrong_key_is_told(kind: Kind, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind.scheme != "abfs":
        pytest.skip("the emulator of Google's takes any")
    monkeypatch.setenv(*azure(port, KEY.replace("Eby8", "Eby9")))
    with pytest.raises(StoreAccessDenied, match="access was denied"):
        open_store(kind.location).find("a")
