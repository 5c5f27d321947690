from __future__ import annotations

import fcntl
import functools
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving.errors import (
    ArchiveError,
    ArtifactChanged,
    DiskFull,
    ModelTooLarge,
    StoreUnavailable,
    Unavailable,
)
from serving.store import Cache, Stop, Store, StoredModel, disk, download, open_store
from serving.store.catalog import StoredFile
from serving.store.download import Stopping
from serving.store.s3 import S3Bucket
from tests.processes import REPOSITORY, eventually
from tests.serving.store.archives import touch
from tests.serving.store.s3 import LOCATION, S3Server, archive, open_cache

KIB = 1024


@pytest.fixture(autouse=True)
def ranged(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small files come in several pieces."""
    monkeypatch.setattr(download, "RANGE_BYTES", 64 * KIB)
    monkeypatch.setattr(download, "PAUSE_S", 0.01)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that gzip cannot compress."""
    return random.Random(seed).randbytes(size)  # noqa: S311


def put(s3: S3Server, name: str, size: int = 400 * KIB, seed: int = 0) -> StoredModel:
    s3.put(f"kogpt2/{name}.tar.gz", archive({f"{name}.params": noise(size, seed)}))
    return find(name)


def find(name: str) -> StoredModel:
    return store(os.environ["AWS_ENDPOINT_URL_S3"]).find(name)


@functools.cache
def store(endpoint: str) -> Store:
    return open_store(LOCATION)


def entries(folder: Path) -> set[str]:
    """Names of the models in a cache, which must have nothing half done in it."""
    assert not list((folder / "parts").iterdir())
    assert not list((folder / "temporary").iterdir())
    return kept(folder)


def kept(folder: Path) -> set[str]:
    """Names of the models in a cache."""
    return {path.name.rpartition("-")[0] for path in (folder / "models").iterdir()}


def child(cache_dir: Path, code: str, location: str = LOCATION) -> Any:
    """A process with a `cache` and a `model`, once it has printed `ready`."""
    start = (
        "from pathlib import Path\n"
        "from serving.store import Cache, Sources, download, open_store\n"
        f"store = open_store({location!r})\n"
        f"cache = Cache(Sources(store), Path({str(cache_dir)!r}), 1 << 30, 1 << 30)\n"
        "model = store.find('소월')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start + code],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def put_here(folder: Path, name: str, size: int = 400 * KIB) -> StoredModel:
    """An archive in a store on this machine."""
    store = folder / "store"
    store.mkdir(exist_ok=True)
    (store / f"{name}.tar.gz").write_bytes(archive({f"{name}.params": noise(size)}))
    return open_store(str(store)).find(name)


def test_an_archive_is_fetched_once_and_survives_a_restart(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = put(s3, "소월"), open_cache(tmp_path)
    with monkeypatch.context() as patched:  # a fetch uses the connections of the store
        patched.setattr("boto3.session.Session", None)
        first = cache.acquire(model)
    assert (first.path / "소월.params").read_bytes() == noise(400 * KIB)
    assert (first.hit, first.bytes) == (False, model.size_bytes)
    assert first.download_s > 0
    assert first.unpack_s >= 0
    again = open_cache(tmp_path).acquire(model)
    assert (again.path, again.hit, again.bytes) == (first.path, True, 0)
    assert entries(tmp_path) == {"소월"}


def test_threads_that_want_the_same_model_fetch_it_once(s3: S3Server, tmp_path: Path) -> None:
    model, cache = put(s3, "a"), open_cache(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        fetched = list(pool.map(cache.acquire, [model] * 4))
    assert sorted(f.hit for f in fetched) == [False, True, True, True]
    assert len({f.path for f in fetched}) == 1


def test_processes_that_want_the_same_model_fetch_it_once(s3: S3Server, tmp_path: Path) -> None:
    put(s3, "소월")
    code = "print('ready', flush=True); input(); print(cache.acquire(model).hit)\n"
    children = [child(tmp_path, code) for _ in range(2)]
    answers = sorted(process.communicate("\n", timeout=60)[0].strip() for process in children)
    assert answers == ["False", "True"]


def test_a_killed_fetch_is_resumed(s3: S3Server, tmp_path: Path) -> None:
    model = put(s3, "소월", 500 * KIB)
    code = (
        "from serving.store.s3 import S3Bucket\n"
        f"download.RANGE_BYTES, download.CONNECTIONS = {64 * KIB}, 1\n"
        "read, asked = S3Bucket.read, []\n"
        "def slow(self, *arguments):\n"
        "    asked.append(arguments)\n"
        "    if len(asked) == 4:\n"
        "        print('ready', flush=True)\n"
        "        input()\n"
        "    return read(self, *arguments)\n"
        "S3Bucket.read = slow\n"
        "cache.acquire(model)\n"
    )
    process = child(tmp_path, code)
    process.kill()
    process.communicate()
    assert list((tmp_path / "temporary").iterdir())
    cache = open_cache(tmp_path)
    assert not list((tmp_path / "temporary").iterdir())
    fetched = cache.acquire(model)
    assert fetched.bytes == model.size_bytes - 3 * 64 * KIB
    assert (fetched.path / "소월.params").read_bytes() == noise(500 * KIB)
    assert entries(tmp_path) == {"소월"}


def test_the_least_recently_used_models_go_first_but_none_in_use(
    s3: S3Server, tmp_path: Path
) -> None:
    # Room for two unpacked models and an archive.
    cache = open_cache(tmp_path, max_bytes=350 * KIB)
    models = {name: put(s3, name, 100 * KIB) for name in "abcd"}
    paths = {name: cache.acquire(models[name]).path for name in "ab"}
    cache.release(paths["b"])
    cache.release(paths["a"])
    paths["c"] = cache.acquire(models["c"]).path
    assert entries(tmp_path) == {"a", "c"}
    assert cache.used_bytes() == 200 * KIB
    cache.acquire(models["a"])
    with pytest.raises(DiskFull, match="in use") as raised:
        cache.acquire(models["d"])
    assert raised.value.status == 507
    assert kept(tmp_path) == {"a", "c"}
    cache.release(paths["c"])
    cache.acquire(models["d"])
    assert entries(tmp_path) == {"a", "d"}


def test_a_model_that_another_process_uses_stays(tmp_path: Path) -> None:
    put_here(tmp_path, "소월", 100 * KIB)
    other = put_here(tmp_path, "a", 100 * KIB)
    code = "cache.acquire(model); print('ready', flush=True); input()\n"
    process = child(tmp_path / "cache", code, str(tmp_path / "store"))
    cache = open_cache(tmp_path / "cache", max_bytes=150 * KIB)
    with pytest.raises(DiskFull):
        cache.acquire(other)
    process.communicate("\n", timeout=60)
    cache.acquire(other)
    assert entries(tmp_path / "cache") == {"a"}


def test_a_model_larger_than_the_cache_removes_nothing(s3: S3Server, tmp_path: Path) -> None:
    cache = open_cache(tmp_path, max_bytes=150 * KIB)
    cache.release(cache.acquire(put(s3, "small", 1000)).path)
    s3.put("kogpt2/zeros.tar.gz", archive({"a.params": bytes(1 << 20)}))
    for large in (put(s3, "large", 200 * KIB), find("zeros")):
        with pytest.raises(ModelTooLarge, match="whole cache"):
            cache.acquire(large)
    assert entries(tmp_path) == {"small"}


def test_what_cannot_be_unpacked_or_is_too_large_leaves_nothing(
    s3: S3Server, tmp_path: Path
) -> None:
    cache = open_cache(tmp_path, model_max_bytes=500 * KIB)
    good, at = archive({"a.params": noise(300 * KIB)}), 150 * KIB
    bad = {
        "cut": good[:at],
        "flipped": good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :],
        "no archive": b"<html>",
        "empty": b"",
        "deep": archive({"x": noise(10), "a/" * 600 + "f": b"1"}),
        "zeros": archive({"x": noise(10), "y": bytes(600 * KIB)}),
    }
    for name, data in bad.items():
        s3.put(f"kogpt2/{name}.tar.gz", data)
        with pytest.raises(ArchiveError, match=rf"{name}\.tar\.gz cannot be unpacked"):
            cache.acquire(find(name))
        assert entries(tmp_path) == set()
    for file in ("a.params", "b.params"):
        s3.put(f"kogpt2/folder/{file}", noise(300 * KIB))
    for large in (put(s3, "large", 600 * KIB), find("folder")):
        with pytest.raises(ArchiveError, match="MODEL_MAX_MIB"):
            cache.acquire(large)
    assert entries(tmp_path) == set()
    assert not list((tmp_path / "locks").iterdir())
    cache.acquire(put(s3, "cut"))  # another version


def test_an_archive_with_its_model_in_a_folder_says_how_to_pack_it(
    s3: S3Server, tmp_path: Path
) -> None:
    members = {"봄/config.json": b"{}", "봄/model.safetensors": b"x"}
    s3.put("kogpt2/봄.tar.gz", archive(members))
    s3.put("kogpt2/맥.tar.gz", archive({"._봄": b"x", **members}))
    s3.put("kogpt2/시.tar.gz", archive({"code/service.py": b"", "1/readme": b"x"}))
    cache = open_cache(tmp_path)
    with pytest.raises(ArchiveError, match=r"봄\.tar\.gz holds its model in a folder, 봄/: pack"):
        cache.acquire(find("봄"))
    with pytest.raises(ArchiveError, match=r"맥\.tar\.gz holds its model in a folder, 봄/: pack"):
        cache.acquire(find("맥"))
    cache.acquire(find("시"))  # a load may name the script


def test_a_damaged_version_is_not_downloaded_again_for_a_while(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("kogpt2/봄.tar.gz", archive({"봄.params": noise(300 * KIB)})[: 150 * KIB])
    model, read, asked = find("봄"), S3Bucket.read, []

    def counted(self: S3Bucket, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        asked.append(start)
        return read(self, file, start, stop)

    monkeypatch.setattr(S3Bucket, "read", counted)

    def fetched(cache: Cache) -> int:
        before = len(asked)
        with pytest.raises(ArchiveError, match=r"봄\.tar\.gz cannot be unpacked"):
            cache.acquire(model)
        return len(asked) - before

    cache = open_cache(tmp_path)
    assert [fetched(cache) > 0 for _ in range(3)] == [True, False, False]
    monkeypatch.setattr("serving.store.cache.BROKEN_S", 0.0)
    cache = open_cache(tmp_path)
    assert [fetched(cache) > 0 for _ in range(2)] == [True, True]
    cache.acquire(put(s3, "봄"))  # another version


def test_a_connection_that_breaks_goes_on_where_it_was(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read, asked = put(s3, "a"), S3Bucket.read, []

    def breaking(self: S3Bucket, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        asked.append(stop - start)
        whole = b"".join(read(self, file, start, stop))
        yield whole[: 40 * KIB]
        if len(whole) > 40 * KIB:
            raise StoreUnavailable("broken off")

    monkeypatch.setattr(S3Bucket, "read", breaking)
    fetched = open_cache(tmp_path).acquire(model)
    assert (fetched.path / "a.params").read_bytes() == noise(400 * KIB)
    assert 24 * KIB in asked


def test_a_store_that_stays_away_is_an_error_and_what_came_is_kept(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = put(s3, "a"), S3Bucket.read

    def gone(self: S3Bucket, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        if start >= 128 * KIB:
            raise StoreUnavailable("gone")
        yield from read(self, file, start, stop)

    monkeypatch.setattr(download, "CONNECTIONS", 1)
    cache = open_cache(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(S3Bucket, "read", gone)
        with pytest.raises(StoreUnavailable, match="gone"):
            cache.acquire(model)
    assert not list((tmp_path / "temporary").iterdir())
    assert cache.acquire(model).bytes == model.size_bytes - 128 * KIB


def test_a_fetch_ends_with_its_cache(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache, asked = put(s3, "a"), open_cache(tmp_path), threading.Event()

    def endless(self: S3Bucket, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        while True:
            asked.set()
            yield b""

    monkeypatch.setattr(S3Bucket, "read", endless)
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(cache.acquire, model)
        assert asked.wait(60)
        cache.close()
        with pytest.raises(StoreUnavailable, match="stopped"):
            fetch.result(60)


def test_a_stopped_fetch_does_not_unpack_an_archive_of_this_machine(tmp_path: Path) -> None:
    model = put_here(tmp_path, "a")
    cache, given_up = open_cache(tmp_path / "cache"), Stop()
    given_up.set()
    with pytest.raises(StoreUnavailable, match="stopped"):
        cache.acquire(model, given_up)
    assert not entries(tmp_path / "cache")
    assert cache.acquire(model).path.is_dir()


def test_models_of_this_machine_are_used_in_place_or_unpacked(tmp_path: Path) -> None:
    store, cache = tmp_path / "store", open_cache(tmp_path / "cache")
    touch(store, "folder/a.params")
    (store / "시.tar.gz").write_bytes(archive({"a.params": b"y"}))
    folder = cache.acquire(open_store(str(store)).find("folder"))
    assert (folder.path, folder.hit) == (store / "folder", True)
    cache.release(folder.path, discard=True)
    assert (store / "folder" / "a.params").exists()
    stored = open_store(f"file://{store}").find("시")
    unpacked = cache.acquire(stored)
    assert (unpacked.path / "a.params").read_text() == "y"
    (store / "시.tar.gz").write_bytes(archive({"a.params": b"newer"}))
    assert cache.acquire(stored).hit  # the version that was found is still there
    shutil.rmtree(tmp_path / "cache" / "models")
    (tmp_path / "cache" / "models").mkdir()
    with pytest.raises(ArtifactChanged):
        cache.acquire(stored)
    newer = cache.acquire(open_store(str(store)).find("시"))
    assert (newer.path / "a.params").read_text() == "newer"


def test_no_leftover_stops_a_start(
    tmp_path: Path, deep: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    open_cache(tmp_path)
    temporary, locks = tmp_path / "temporary", tmp_path / "locks"
    deep(temporary / "deep")
    (temporary / "closed" / "below").mkdir(parents=True)
    (temporary / "closed" / "below" / "f").touch()
    (temporary / "closed" / "below").chmod(0)
    (temporary / "closed").chmod(0o500)
    os.mkfifo(temporary / "pipe")
    os.symlink(tmp_path, temporary / "link")
    os.mkdir(bytes(temporary) + b"/\xff\xfe")
    (temporary / "file").touch()
    (temporary / ("n" * 255)).touch()  # no lock can have this name
    (locks / "folder.pin").mkdir()
    os.mkfifo(locks / "pipe.fetch")
    open_cache(tmp_path)
    assert [path.name for path in temporary.iterdir()] == ["n" * 255]
    assert [path.name for path in locks.iterdir()] == ["folder.pin"]
    assert {"folder", "n" * 255} <= {record.args[0] for record in caplog.records if record.args}
    assert tmp_path.is_dir()


def test_a_leftover_that_cannot_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: object, *arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    open_cache(tmp_path)
    (tmp_path / "temporary" / "남은것").mkdir()
    with monkeypatch.context() as context:
        context.setattr(os, "rmdir", refuse)
        cache = open_cache(tmp_path)
    assert "남은것 cannot be removed" in caplog.text
    assert cache.used_bytes() == 0


def test_whatever_is_in_the_cache_can_make_room(
    tmp_path: Path, deep: Callable[[Path], None]
) -> None:
    cache = open_cache(tmp_path / "cache", max_bytes=150 * KIB)
    deep(tmp_path / "cache" / "models" / "deep")
    (tmp_path / "cache" / "models" / "deep" / "weights").write_bytes(bytes(150 * KIB))
    cache.acquire(put_here(tmp_path, "a", 100 * KIB))
    assert entries(tmp_path / "cache") == {"a"}


def test_what_turned_out_to_be_no_model_is_not_kept(s3: S3Server, tmp_path: Path) -> None:
    model = put(s3, "소월")
    fetching = open_cache(tmp_path)
    fetching.release(fetching.acquire(model).path, discard=True)  # the same would come again
    assert entries(tmp_path) == {"소월"}
    cache = open_cache(tmp_path)  # what came before a crash of the machine may be damaged
    first, second = cache.acquire(model), cache.acquire(model)
    cache.release(first.path, discard=True)
    assert entries(tmp_path) == {"소월"}  # another uses it
    cache.release(second.path, discard=True)
    assert entries(tmp_path) == set()
    assert not list((tmp_path / "locks").iterdir())
    assert not cache.acquire(model).hit


def put_on_a_small_disk(s3: S3Server, tmp_path: Path, kind: str, name: str) -> StoredModel:
    """Put a model of 400 KiB into a store; the small disk holds two such models at most."""
    if kind == "folder in s3":
        s3.put(f"kogpt2/{name}/{name}.params", noise(400 * KIB))
        return find(name)
    return put(s3, name) if kind == "archive in s3" else put_here(tmp_path, name)


@pytest.mark.parametrize("kind", ["archive in s3", "folder in s3", "local archive"])
def test_unused_models_make_room_on_a_disk_that_is_full_before_the_cache(
    s3: S3Server, tmp_path: Path, small_disk: Path, kind: str
) -> None:
    cache = open_cache(small_disk / "cache", max_bytes=100 << 30)
    for name in ("봄", "여름", "가을", "봄"):
        fetched = cache.acquire(put_on_a_small_disk(s3, tmp_path, kind, name))
        assert (fetched.path / f"{name}.params").read_bytes() == noise(400 * KIB)
        cache.release(fetched.path)
    assert "봄" in entries(small_disk / "cache")


def test_a_late_thread_of_a_failed_download_keeps_no_space(
    s3: S3Server, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "JOIN_S", 0.0)
    late, end, read = threading.Event(), threading.Event(), S3Bucket.read

    def read_late(self: S3Bucket, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        if "여름" in file.address and stop == file.size_bytes and not late.is_set():
            late.set()  # the disk is full meanwhile, as the model before has no room beside it
            assert end.wait(60)
        yield from read(self, file, start, stop)

    monkeypatch.setattr(S3Bucket, "read", read_late)
    cache = open_cache(small_disk / "cache", max_bytes=100 << 30)
    for name in ("봄", "여름", "가을"):
        cache.release(cache.acquire(put(s3, name)).path)
    assert late.is_set()
    end.set()
    assert kept(small_disk / "cache") == {"가을"}


def test_a_full_disk_says_how_much_is_missing_where_all_is_in_use(
    tmp_path: Path, small_disk: Path
) -> None:
    cache = open_cache(small_disk / "cache", max_bytes=100 << 30)
    models = [put_here(tmp_path, name) for name in "abc"]
    paths = [cache.acquire(model).path for model in models[:2]]
    with pytest.raises(DiskFull) as raised:
        cache.acquire(models[2])
    assert 0 < raised.value.missing_bytes <= 400 * KIB
    assert entries(small_disk / "cache") == {"a", "b"}
    cache.release(paths[0])
    cache.acquire(models[2])
    assert entries(small_disk / "cache") == {"b", "c"}


def test_a_disk_on_which_not_even_a_folder_can_be_made_is_full(
    tmp_path: Path, small_disk: Path
) -> None:
    model = put_here(tmp_path, "a", 10 * KIB)
    cache = open_cache(small_disk / "cache", max_bytes=100 << 30)
    subprocess.run(["mount", "-o", "remount,nr_inodes=8", str(small_disk)], check=True)
    with pytest.raises(DiskFull) as raised:
        cache.acquire(model)
    assert raised.value.missing_bytes > 0


@pytest.mark.parametrize("held", ["lock", "locks/{key}.pin", "locks/{key}.fetch"])
def test_a_lock_that_another_process_holds_is_named_and_delays_neither_start_nor_cached_models(
    tmp_path: Path, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.store.disk.LOCK_LIMIT_S", 0.0)
    model, cached = put_here(tmp_path, "봄"), put_here(tmp_path, "시")
    root = tmp_path / "cache"
    cache = open_cache(root, str(tmp_path / "store"), max_bytes=500 * KIB)
    cache.release(cache.acquire(cached).path)
    path = root / held.format(key=model.key)
    holder = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    pin = os.open(root / f"locks/{model.key}.pin", os.O_RDWR | os.O_CREAT)
    if held.endswith("fetch"):  # as a process does that fetches
        fcntl.flock(pin, fcntl.LOCK_SH)
    cache = open_cache(root, str(tmp_path / "store"), max_bytes=500 * KIB)
    assert cache.acquire(cached).hit
    cache.release(root / "models" / cached.key)
    stop = Stop()
    if held.endswith("fetch"):  # a fetch may take long: the load's own limit ends it
        with ThreadPoolExecutor(1) as threads:
            fetch = threads.submit(cache.acquire, model, stop)
            eventually(lambda: stop.waits_for == path)
            stop.set()
        with pytest.raises(Stopping):
            fetch.result()
    else:
        with pytest.raises(Unavailable, match=f"another process holds the lock {path}"):
            cache.acquire(model, stop)
    os.close(holder)
    os.close(pin)
    cache.acquire(model)


def test_a_model_that_was_not_on_the_disk_at_a_crash_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, synced = threading.Event(), list[str]()

    def sync(folder: Path) -> None:
        if folder.name.startswith("봄"):
            assert go_on.wait(60)
        disk.sync(folder)
        synced.append(folder.name)

    monkeypatch.setattr("serving.store.cache_disk.sync", sync)
    late, early = put_here(tmp_path, "봄"), put_here(tmp_path, "시")
    root, location = tmp_path / "cache", str(tmp_path / "store")
    cache = open_cache(root, location)
    for model in (late, early):
        cache.release(cache.acquire(model).path)
    eventually(lambda: (root / "fetched" / early.key).read_text() == "synced")
    assert synced == [early.key]
    cache = open_cache(root, location)  # as after a kill: the kernel still writes the files
    assert cache.holds(late)
    assert cache.holds(early)
    monkeypatch.setattr("serving.store.cache_disk.boot", lambda: "the next one")
    (root / "models" / late.key / "봄.params").write_bytes(b"")
    cache = open_cache(root, location)
    assert not cache.holds(late)
    assert cache.holds(early)
    go_on.set()
    found = cache.acquire(late)
    assert not found.hit
    assert (found.path / "봄.params").stat().st_size == 400 * KIB
    eventually(lambda: (root / "fetched" / late.key).read_text() == "synced")
