"""Archives and services of Multi Model Server, and scripts that are named: how they load."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import FAST, error, serving

pytestmark = pytest.mark.slow

GUIDE = (REPOSITORY / "docs" / "models" / "handlers.md").read_text("utf-8")
SERVICE = GUIDE.partition("# service.py\n")[2].partition("```")[0]
PROGRAM = """
def model_fn(folder):
    return "셈"


def transform_fn(model, body, *types):
    return model
"""


def mar(path: Path, **manifest: Any) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("service.py", SERVICE)
        if manifest:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": manifest}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mms")
    store = folder / "store"
    for path, text in (("counter/service.py", SERVICE), ("program/code/entry.py", PROGRAM)):
        (store / path).parent.mkdir(parents=True)
        (store / path).write_text(text, encoding="utf-8")
    mar(store / "file.mar", modelName="셈", handler="service:handle")
    mar(store / "odd.mar", modelName="../x", handler="service:handle")
    mar(store / "nameless.mar", handler="service:handle")
    mar(store / "bare.mar")
    with serving(folder, store, **FAST, SAGEMAKER_PROGRAM="entry.py") as running:
        yield running


@pytest.fixture(autouse=True)
def unloaded(server: Server) -> Iterator[None]:
    yield
    for name in names(server):
        assert server.unload(name).status_code == 200


def names(server: Server) -> list[str]:
    models = requests.get(server.url("/models"), timeout=60).json()["models"]
    return [model["modelName"] for model in models]


def load(server: Server, **body: Any) -> requests.Response:
    return requests.post(server.url("/models"), json=body, timeout=120)


def count(server: Server, name: str) -> Any:
    return server.predict(name, {"text": "진달래꽃"}).json()


def test_an_archive_is_called_what_its_manifest_says(server: Server) -> None:
    assert load(server, url="file.mar").status_code == 200
    assert names(server) == ["셈"]
    assert count(server, "셈") == {"characters": 4}
    assert load(server, url="file").status_code == 409
    assert load(server, url="file.mar", model_name="other").status_code == 200
    assert names(server) == ["other", "셈"]


def test_a_name_in_a_manifest_that_is_none_is_refused(server: Server) -> None:
    answer = load(server, url="odd.mar")
    assert error(answer)[0] == 400
    assert "'../x' is no model name" in answer.json()["message"]
    assert load(server, url="odd.mar", model_name="odd").status_code == 200


def test_an_archive_without_a_name_is_called_as_its_file(server: Server) -> None:
    assert load(server, url="nameless.mar").status_code == 200
    assert names(server) == ["nameless"]


@pytest.mark.parametrize("url", ["bare.mar", "counter"])
def test_what_has_no_manifest_loads_with_the_handler_that_is_named(
    server: Server, url: str
) -> None:
    name = url.removesuffix(".mar")
    assert load(server, url=url).status_code in (400, 404)
    assert load(server, url=url, handler="other:handle").status_code in (400, 404)
    assert names(server) == []
    answer = load(server, url=url, handler="service:handle")
    assert answer.status_code == 200, answer.text
    assert names(server) == [name]
    assert count(server, name) == {"characters": 4}


def test_a_folder_with_the_program_of_the_server_is_a_model(server: Server) -> None:
    assert server.predict("program", "x").text == "셈"
    listed = requests.get(server.url("/models?available=true"), timeout=60).json()["models"]
    assert "program" in [model["modelName"] for model in listed]
