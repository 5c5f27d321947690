"""Reads models in SageMaker's folders that only root may read, to copy them into the cache."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.model_files import is_hidden
from serving.errors import ArtifactChanged, ModelNotInStore, StoreUnavailable
from serving.names import normal_name
from serving.store.catalog import StoredFile, StoredModel, folder_model
from serving.store.folder import file_version, read_range

SCHEME = "root"
ANSWER_S = 30.0  # time limit of opening a file, which takes some 0.1 ms


class RootFiles:
    """A `Remote` of files below `folders`, opened by `serving.process.file_opener`. Thread-safe."""

    ranged, paced = True, False

    def __init__(self, requests: socket.socket, folders: Sequence[Path]) -> None:
        self._requests, self._folders = requests, folders

    def find(self, path: Path) -> StoredModel | None:
        """Return the model at a path that this process may not read; otherwise None.

        Raises `StoreUnavailable`.
        """
        path = Path(os.path.normpath(path))
        if not any(path.is_relative_to(folder) for folder in self._folders) or is_readable(path):
            return None
        try:
            return _model(path, list(self._walk(path)))
        except OSError:
            return None

    def files(self, model: StoredModel) -> list[StoredFile]:
        path = Path(model.url.partition("://")[2])
        try:
            files = list(self._walk(path))
        except OSError:
            raise ModelNotInStore(f"there is no model at {model.url}") from None
        if _model(path, files).version != model.version:
            raise ArtifactChanged(f"{model.url} has changed; try again")
        return files

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        return read_range(file, start, stop, lambda path, _: self._open(Path(path)))

    def _walk(self, path: Path) -> Iterator[StoredFile]:
        """Yield the file at a path, or all files below it except for hidden files and links."""
        pending = [path]
        while pending:
            place = pending.pop()
            try:
                descriptor = self._open(place)
            except OSError:
                if place == path:
                    raise
                continue  # a link, or it has vanished
            try:
                status = os.fstat(descriptor)
                if stat.S_ISDIR(status.st_mode):
                    names = os.listdir(descriptor)
                    pending += [place / name for name in names if not is_hidden(name)]
                else:
                    relative = "" if place == path else str(place.relative_to(path))
                    version = file_version(status)
                    yield StoredFile(relative, str(place), status.st_size, version)
            finally:
                os.close(descriptor)

    def _open(self, path: Path) -> int:
        """Open a file or folder. Raises `OSError`, or `StoreUnavailable` without a reply."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.settimeout(ANSWER_S)
            try:
                with theirs:
                    socket.send_fds(self._requests, [os.fsencode(path)], [theirs.fileno()])
                answer, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
            except OSError:
                answer, descriptors = b"", []
        if descriptors:
            return descriptors[0]
        if not answer:
            raise StoreUnavailable(
                f"{path} is readable by root only, and the process that opens such files for the"
                " server does not answer: start the container again"
            )
        raise OSError(int(answer), os.strerror(int(answer)))


def _model(path: Path, files: list[StoredFile]) -> StoredModel:
    """Return the model at a path of these files, or of one file, whose relative path is empty."""
    name, url = normal_name(path.name), f"{SCHEME}://{path}"
    if [file.path for file in files] == [""]:
        return StoredModel(name, url, files[0].version, files[0].size_bytes, "archive")
    return folder_model(name, url, files)


def is_readable(path: Path) -> bool:
    """Return whether this process may read all files at or below a path; true without files."""
    pending = [str(path)]
    while pending:
        place = pending.pop()
        try:
            if stat.S_ISDIR(os.stat(place).st_mode):
                with os.scandir(place) as entries:
                    pending += [e.path for e in entries if e.name[0] != "." and not e.is_symlink()]
            elif not os.access(place, os.R_OK):
                return False
        except PermissionError:
            return False
        except (OSError, ValueError):  # it has vanished, or there never was such a path
            continue
    return True
