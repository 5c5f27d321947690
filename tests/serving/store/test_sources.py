from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from serving.errors import (
    ModelNotInStore,
    ServingError,
    StartError,
    StoreUnavailable,
    UrlNotAllowed,
)
from serving.store import Cache, Sources, download, open_store
from serving.store.catalog import DRIVERS
from serving.store.https import Https
from tests.serving.store.archives import touch
from tests.serving.store.file_host import FileHandler, FileHost, running
from tests.serving.store.s3 import ENVIRONMENT, LOCATION, archive

ARCHIVE = archive({"a.params": bytes(range(256)) * 4000}, level=0)


class Handler(FileHandler):
    """`/plain/` answers whole files only, `/ranged/` parts, too; `/away/` leads elsewhere."""

    def do_GET(self) -> None:
        kind, wanted = self.path.split("/")[1], self.headers.get("Range")
        moved = {"away": "http://localhost:1/x", "here": "/ranged/" + quote("시") + ".tar.gz"}
        if kind in moved:
            self.send(302, headers={"Location": moved[kind]})
        elif kind not in ("plain", "ranged"):
            self.send(404)
        elif wanted and kind == "ranged":
            first, last = wanted.removeprefix("bytes=").split("-")
            part = ARCHIVE[int(first) : int(last) + 1]
            self.send(206, part, {"Content-Range": f"bytes {first}-{last}/{len(ARCHIVE)}"})
        else:
            self.send(200, ARCHIVE)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = FileHost(("127.0.0.1", 0), Handler)
    with running(server):
        yield f"127.0.0.1:{server.server_port}"


@pytest.fixture
def folder(tmp_path: Path) -> Sources:
    """A store, a root beside it, and what is outside of both."""
    touch(tmp_path, "store/시/a.params", "root/hash/model/a.params", "outside/m/a.params")
    return Sources(open_store(str(tmp_path / "store")), (tmp_path / "root",))


def from_hosts(folder: Path, *hosts: str) -> Sources:
    """A store without models, and hosts to download from."""
    return Sources(open_store(str(folder)), https_hosts=hosts)


def test_names_and_paths_below_a_root_are_located(folder: Sources, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert folder.locate("시").url == str(tmp_path / "store" / "시")
    assert folder.locate(f"{root}/hash/model").url == f"{root}/hash/model"
    for url in (f"{folder.store.location}/시", f"file://{folder.store.location}/{quote('시')}"):
        assert folder.locate(url) == folder.locate("시")
    touch(tmp_path, "store/file/a.params", "root/hash/봄.mar")
    assert folder.locate(f"{root}/hash/봄.mar").name == "봄"
    assert folder.locate("file").name == "file"  # and no scheme
    with pytest.raises(ModelNotInStore):
        folder.locate(f"{root}/없음")


def test_paths_do_not_lead_out(folder: Sources, tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    os.symlink(outside, root / "link")
    os.symlink(outside / "m", tmp_path / "store" / "link")
    for url in (
        f"{outside}/m",
        f"file://{outside}/m",
        f"{root}/../outside/m",
        f"file://{root}/%2e%2e/outside/m",
        f"{root}/link/m",
        f"{folder.store.location}/link",
        f"file://elsewhere{root}/hash/model",
        "../outside/m",
        "시/../../outside/m",
        "/etc",
        f"{root}\0",
    ):
        with pytest.raises(UrlNotAllowed, match="Allowed: a name in the store") as raised:
            folder.locate(url)
        assert raised.value.status == 400


def test_other_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    own = Sources(open_store(LOCATION))
    for url in (
        "s3://other/kogpt2/a.tar.gz",
        "s3://models/a.tar.gz",
        "s3://models/kogpt2/../a.tar.gz",
        "s3://models/kogpt2-other/a.tar.gz",
        "gs://models/kogpt2/a.tar.gz",
        "https://models.example/a.tar.gz",
        "ftp://models.example/a.tar.gz",
        "/opt/ml/models/a",
        "",
    ):
        with pytest.raises(UrlNotAllowed, match=r"s3://models/kogpt2/<name>\.tar\.gz"):
            own.locate(url)


@pytest.mark.parametrize("kind", ["plain", "ranged", "here"])
def test_archives_come_from_hosts_that_are_allowed(
    host: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "RANGE_BYTES", 100_000)
    own = from_hosts(tmp_path, host)
    model = own.locate(f"http://{host}/{kind}/{quote('시')}.tar.gz?key=secret")
    assert (model.name, model.size_bytes) == ("시", len(ARCHIVE))
    fetched = Cache(own, tmp_path / "cache", 0, 1 << 30).acquire(model)
    assert (fetched.path / "a.params").read_bytes() == bytes(range(256)) * 4000


def test_other_hosts_and_redirects_to_them_are_refused(host: str, tmp_path: Path) -> None:
    own = from_hosts(tmp_path, host, "models.example:80")
    for url in (
        f"http://{host}/away/a.tar.gz",
        f"https://{host.replace('127.0.0.1', '127.0.0.2')}/a.tar.gz",
        "http://models.example/a.tar.gz",
        "https://models.example/a.tar.gz",
        f"http://user@{host}/a.tar.gz",
        f"http://{host}\\@models.example/a.tar.gz",
        f"http://{host}.models.example/a.tar.gz",
        "https://[/a.tar.gz",
    ):
        with pytest.raises(UrlNotAllowed, match=f"Allowed: .*https?://{host}"):
            own.locate(url)
    with pytest.raises(ModelNotInStore):
        own.locate(f"http://{host}/none/a.tar.gz")
    own = from_hosts(tmp_path, "127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="cannot be read") as raised:
        own.locate("http://127.0.0.1:1/a.tar.gz?key=secret")
    assert "secret" not in raised.value.message


def test_no_error_and_no_log_has_the_query_of_an_address(
    host: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    own = from_hosts(tmp_path, host)
    secret = "?X-Amz-Signature=0123abcd"  # noqa: S105
    for url in (
        f"http://{host}/none/a.tar.gz{secret}",
        f"http://{host}/away/a.tar.gz{secret}",
        f"https://models.example/a.tar.gz{secret}",
        f"https://[/a.tar.gz{secret}",
        f"http://{host}/a b.tar.gz{secret}",
        f"ftp://{host}/a.tar.gz{secret}",
        f"HTTPS://{host}/a.tar.gz{secret}",
    ):
        with pytest.raises(ServingError) as raised:
            own.locate(url)
        assert "0123abcd" not in raised.value.message
    model = own.locate(f"http://{host}/ranged/a.tar.gz{secret}")
    for most in (100, 10_000, 1 << 30):
        cache = Cache(own, tmp_path / "cache", 0, most)
        with contextlib.suppress(ServingError):
            assert cache.acquire(model).path.is_dir()
    with monkeypatch.context() as broken:
        broken.setattr(Https, "read", lambda self, file, start, stop: iter([b"x" * (stop + 1)]))
        cache = Cache(own, tmp_path / "other", 0, 1 << 30)
        with pytest.raises(StoreUnavailable, match="more than the requested") as raised:
            cache.acquire(model)
        assert "0123abcd" not in raised.value.message
    assert "/ranged/a.tar.gz" in caplog.text
    assert "0123abcd" not in caplog.text


@pytest.mark.parametrize("scheme", DRIVERS)
def test_a_missing_driver_says_how_to_install_it(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(StartError, match=r"pip install -r requirements/store\.txt"):
        open_store(f"{scheme}://models/kogpt2/")
