"""Models that only root may read are copied into the cache of a server that is not root."""

from __future__ import annotations

import codecs
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.errors import ArtifactChanged, ModelNotInStore, StoreUnavailable, UrlNotAllowed
from serving.process.file_opener import open_below, start
from serving.process.user import become
from serving.store import Cache, RootFiles, Sources, StoredModel, open_store
from serving.store.root_files import is_readable
from tests.processes import in_a_fork
from tests.serving.store.archives import touch
from tests.serving.store.s3 import archive

A_USER = 54327
BIG = os.urandom(3 << 20)  # several pieces
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root closes files to a server")


def closed(folder: Path, files: dict[str, bytes]) -> Path:
    """A folder that only its owner may read."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


@pytest.fixture
def models(open_folder: Path) -> Path:
    """The folder in place of /opt/ml/models."""
    (open_folder / "models").mkdir()
    return open_folder / "models"


@contextlib.contextmanager
def opener(folder: Path) -> Iterator[socket.socket]:
    """The process that opens files below a folder; it ends by itself."""
    before = {*psutil.Process().children()}
    requests = start([folder])
    (process,) = {*psutil.Process().children()} - before
    with requests:
        yield requests
    assert os.waitpid(process.pid, 0)[1] == 0  # psutil's wait once gave no status


@pytest.fixture
def sources(models: Path) -> Iterator[Sources]:
    with opener(models) as requests:
        yield Sources(open_store(str(models)), root_files=RootFiles(requests, (models,)))


def as_a_user(sources: Sources, cache_dir: Path, function: Callable[[Cache], Any]) -> Any:
    """What `function` returns for a cache in a process that is not root."""
    codecs.lookup("ascii")  # imported now: the user may not read root's Python

    def user() -> Any:
        become(A_USER, [cache_dir])
        return function(Cache(sources, cache_dir, 0, 1 << 30))

    return in_a_fork(user)


@needs_root
def test_a_closed_model_is_copied_once_and_an_open_one_used_in_place(
    models: Path, sources: Sources
) -> None:
    content = {"model.params": BIG, "code/시.py": "봄".encode(), ".prepared/x": b"trusted"}
    folder = closed(models / "7f3e" / "model", content)
    packed = {"소월.tar.gz": archive({"model.params": "산".encode()})}
    file = closed(models / "a", packed) / "소월.tar.gz"
    open_one = models / "open"
    touch(open_one, "model.params")

    def user(cache: Cache) -> Any:
        model = sources.locate(str(folder))
        fetched = cache.acquire(model)
        copied = [path for path in fetched.path.rglob("*") if path.is_file()]
        names = sorted(str(path.relative_to(fetched.path)) for path in copied)
        same = [(fetched.path / name).read_bytes() == content[name] for name in names]
        again = cache.acquire(sources.locate(str(folder)))
        other = cache.acquire(sources.locate(str(open_one)))
        unpacked = cache.acquire(sources.locate(str(file))).path / "model.params"
        found = [model.name, names, same, [fetched.hit, again.hit], str(other.path)]
        return [*found, unpacked.read_text("utf-8")]

    assert as_a_user(sources, models.parent / "cache", user) == [
        "model",
        ["code/시.py", "model.params"],
        [True, True],
        [False, True],
        str(open_one),
        "산",
    ]


@pytest.fixture
def opened(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> RootFiles:
    """What opens files, for a process that may read none by itself."""
    monkeypatch.setattr("serving.store.root_files.is_readable", lambda path: False)
    assert sources.root_files is not None
    return sources.root_files


def test_a_model_that_changes_or_goes_meanwhile_is_not_mixed(
    models: Path, opened: RootFiles
) -> None:
    folder = closed(models / "a", {"model.params": b"1", "시/b": b"2"})
    model = opened.find(folder)
    assert model is not None
    files = {file.path: file for file in opened.files(model)}
    first, second = files["model.params"], files["시/b"]
    assert b"".join(opened.read(first, 0, 1)) == b"1"
    (folder / "model.params").write_bytes(b"33")
    assert b"".join(opened.read(second, 0, 1)) == b"2"
    with pytest.raises(ArtifactChanged):
        list(opened.read(first, 0, 1))
    with pytest.raises(ArtifactChanged):
        opened.files(model)
    folder.rename(models / "gone")
    with pytest.raises(ModelNotInStore):
        opened.files(model)
    with pytest.raises(ModelNotInStore):
        list(opened.read(second, 0, 1))


def test_what_is_not_there_has_the_error_that_it_had(
    models: Path, sources: Sources, opened: RootFiles
) -> None:
    with pytest.raises(ModelNotInStore, match="there is no model"):
        sources.locate(str(models / "없음"))
    for url in ("/etc/passwd", f"{models}/../cache", f"{models}\0"):
        with pytest.raises(UrlNotAllowed):
            sources.locate(url)
    with pytest.raises(UrlNotAllowed):
        sources.locate(f"root://{models}/a")


def test_without_the_process_the_server_says_so(models: Path) -> None:
    closed(models / "a", {"model.params": b"1"})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, pytest.raises(StoreUnavailable, match="start the container again"):
        RootFiles(ours, (models,)).files(StoredModel("a", f"root://{models}/a", "", 1, "folder"))


def test_only_plain_files_and_folders_below_the_given_ones_are_opened(models: Path) -> None:
    closed(models / "시", {"a/model.params": b"1"})
    (models / "link").symlink_to("/etc")
    (models / "시" / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(models / "pipe")
    place = os.fsencode(models)
    for path in (b"", b"/", "/시/a".encode(), "/시//a/model.params".encode()):
        os.close(open_below(place + path, [place]))
    for path in (
        *(b"/etc/passwd", b"", place + b"2", place + b"/../models", place + b"/./pipe"),
        *(place + b"/link", place + b"/link/passwd", place + "/시/passwd".encode()),
        *(place + b"/pipe", place + b"/none", place + b"/" + b"x" * 300),
    ):
        with pytest.raises(OSError, match=r"\[Errno"):
            open_below(path, [place])


def test_it_ends_with_the_server_and_not_by_what_it_is_sent(models: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with opener(models) as requests, ours, theirs:
        requests.send(b"without a socket")
        socket.send_fds(requests, [os.fsencode(models) + b"/\0"], [theirs.fileno()])
        assert ours.recv(16) == b"22"  # EINVAL
        socket.send_fds(requests, [os.fsencode(models)], [theirs.fileno()])
        answer, (folder,), _, _ = socket.recv_fds(ours, 16, 1)
        assert (answer, os.listdir(folder)) == (b"0", [])
        os.close(folder)


def test_a_folder_is_readable_if_all_is_that_is_used_of_it(open_folder: Path) -> None:
    folder = closed(open_folder / "a", {"b/model.params": b"1", ".hidden/c": b"2"})
    assert is_readable(folder)
    assert is_readable(folder / "none")
    assert is_readable(Path(f"{folder}/\0"))
    folder.chmod(0o755)
    (folder / "b").chmod(0o755)
    (folder / "link").symlink_to("/root/none")

    def user() -> list[bool]:
        if os.geteuid() == 0:
            os.setresuid(A_USER, A_USER, A_USER)
        before = is_readable(folder)
        return [before, is_readable(folder / "b"), is_readable(folder / "b" / "model.params")]

    everything = [os.geteuid() != 0] * 3
    assert in_a_fork(user) == everything
    (folder / "b" / "model.params").chmod(0o644)
    assert in_a_fork(user) == [True] * 3
