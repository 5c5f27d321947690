"""A model has one name, however it is spelled, and what is refused leaves nothing."""

from __future__ import annotations

import unicodedata
from urllib.parse import quote

import pytest
import requests

from tests.e2e.server import Server
from tests.e2e.stores import error, packed, small
from tests.serving.store.s3 import archive

NFD = unicodedata.normalize("NFD", "소월")


@pytest.fixture(scope="module")
def server(clean: Server, tmp_path_factory: pytest.TempPathFactory) -> Server:
    packed(small(tmp_path_factory.mktemp("unpacked")), clean.store / f"{NFD}.tar.gz")
    (clean.store / "deep.tar.gz").write_bytes(archive({"a/" * 600 + "f": b"1"}))
    (clean.store / "nothing.tar.gz").write_bytes(archive({"README.md": "시".encode()}))
    return clean


def names(server: Server) -> list[str]:
    models = requests.get(server.url("/models"), timeout=60).json()["models"]
    return [model["modelName"] for model in models]


def test_all_spellings_are_one_model(server: Server) -> None:
    assert server.load(NFD, "소월.tar.gz").status_code == 200
    assert names(server) == ["소월"]
    for name in ("소월", "소월.tar.gz", NFD, "소월.mar"):
        assert server.load(name, "소월").status_code == 409
        for path in (f"/predictions/{quote(name)}", f"/models/{quote(name)}/invoke"):
            body = {"inputs": "나", "parameters": {"max_new_tokens": 1}}
            assert requests.post(server.url(path), json=body, timeout=60).status_code == 200
        target = {"X-Amzn-SageMaker-Target-Model": name.encode()}
        answer = requests.post(server.url("/invocations"), json="나", headers=target, timeout=60)
        assert answer.status_code == 200
        ready = requests.get(server.url(f"/v2/models/{quote(name)}/ready"), timeout=60)
        assert ready.json() == {"name": "소월", "ready": True}
        described = requests.get(server.url(f"/models/{quote(name)}"), timeout=60)
        assert described.json()["modelName"] == "소월"
    assert names(server) == ["소월"]
    assert server.unload(quote(f"{NFD}.tar.gz")).status_code == 200
    assert names(server) == []


@pytest.mark.parametrize("name", ["../x", "/etc", "a//b", ".hidden", "a\\b", ".tar.gz", "가" * 400])
def test_what_is_no_name_is_refused_with_what_is(server: Server, name: str) -> None:
    answer = server.load(name, "소월")
    assert error(answer)[0] == 400
    assert "a name like sowol or team/sowol is" in answer.json()["message"]
    assert names(server) == []


def test_a_damaged_archive_is_not_kept(server: Server) -> None:
    """An archive without a model is: it is not downloaded again at each request for it."""
    cache = server.run_dir / "models" / "models"
    before = {path.name for path in cache.iterdir()}
    for name in ("nothing", "deep"):
        assert error(server.load(name)) == (400, "ArtifactError")
    more = {path.name for path in cache.iterdir()} - before
    assert {name.rpartition("-")[0] for name in more} <= {"nothing"}
