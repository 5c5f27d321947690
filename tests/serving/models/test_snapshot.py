from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from serving.errors import ServingError
from serving.models.model import LOAD_S, Model
from serving.models.snapshot import Snapshot
from serving.store import StoredModel, public_url
from tests.serving.store.s3 import open_cache

SECRET = "X-Amz-Signature=0123abcd"  # noqa: S105
URL = f"https://user:0123abcd@models.example/%EC%8B%9C.tar.gz?{SECRET}#0123abcd"


def model(stored: StoredModel, id: str = "a-1") -> Model:
    return Model("시", public_url(stored.url), id, stored, {"response_timeout": 60})


def several() -> list[Model]:
    return [model(StoredModel("시", f"/봄/{i}", "v1", 10, "folder"), f"a-{i}") for i in range(3)]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "https://models.example/%EC%8B%9C.tar.gz"),
        ("http://[::1", "http://[::1"),
        ("ftp://a:b@host?c", "ftp://host"),
        ("s3://bucket/what?.tar.gz", "s3://bucket/what?.tar.gz"),
        ("팀/what?", "팀/what?"),
        ("/opt/ml/model", "/opt/ml/model"),
    ],
)
def test_an_address_is_shown_without_its_keys(url: str, shown: str) -> None:
    assert public_url(url) == shown


async def test_a_url_with_a_key_is_not_written_and_its_model_is_found_in_the_cache(
    tmp_path: Path,
) -> None:
    stored = StoredModel("시", URL, "v1", 10, "archive")
    snapshot = Snapshot(tmp_path)
    await snapshot.write([model(stored)], {})
    for path in tmp_path.iterdir():
        assert b"0123abcd" not in path.read_bytes()
    (restored,) = snapshot.read()[0]
    cache = open_cache(tmp_path / "cache", str(tmp_path))
    with pytest.raises(ServingError) as raised:  # it is not there yet, and cannot be fetched
        cache.acquire(restored.stored)
    assert "0123abcd" not in raised.value.message
    (tmp_path / "cache" / "models" / stored.key).mkdir()
    assert cache.acquire(restored.stored).path == cache.acquire(stored).path


@pytest.mark.parametrize("kind", ["is_adapter", "is_delta"])
async def test_how_a_model_depends_on_its_base_is_written(tmp_path: Path, kind: str) -> None:
    base = StoredModel("바탕", "/바탕", "v1", 10, "folder")
    written = model(StoredModel("시", "/시", "v1", 10, "folder"))
    written.stored_base = base
    setattr(written, kind, True)
    snapshot = Snapshot(tmp_path)
    await snapshot.write([written], {})
    (restored,) = snapshot.read()[0]
    assert (restored.stored_base, restored.needs_base) == (base, True)
    assert (restored.is_adapter, restored.is_delta) == (written.is_adapter, written.is_delta)


async def test_what_changes_of_one_of_many_models_is_written(tmp_path: Path) -> None:
    snapshot = Snapshot(tmp_path)
    models = several()
    await snapshot.write(models, {})
    models[1].line.capacity = 7
    models[2].socket, models[2].load_s = "/run/9001", 2.5
    await snapshot.write(models, {})
    assert [(m.line.capacity, m.socket, m.load_s) for m in snapshot.read()[0]] == [
        (1, "", LOAD_S),
        (7, "", LOAD_S),
        (1, "/run/9001", 2.5),
    ]
    await snapshot.write(models[1:], {})
    assert [m.url for m in snapshot.read()[0]] == ["/봄/1", "/봄/2"]


async def test_a_write_that_hangs_holds_up_no_other_work_and_the_last_list_wins(
    tmp_path: Path,
) -> None:
    snapshot = Snapshot(tmp_path)
    models = several()
    os.mkfifo(tmp_path / "models.new")  # a write to it waits for a reader
    first = asyncio.create_task(snapshot.write(models[:1], {}))
    await asyncio.sleep(0)
    cancelled = asyncio.create_task(snapshot.write(models[:2], {}))
    await asyncio.sleep(0)
    cancelled.cancel()
    last = asyncio.create_task(snapshot.write(models, {}))
    await asyncio.sleep(0)
    assert not first.done()
    assert not last.done()
    text = await asyncio.to_thread((tmp_path / "models.new").read_text)
    assert [row["url"] for row in json.loads(text)["models"]] == ["/봄/0"]
    await asyncio.gather(first, last)
    assert [m.url for m in snapshot.read()[0]] == ["/봄/0", "/봄/1", "/봄/2"]
