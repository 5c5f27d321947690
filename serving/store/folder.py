"""A store in a folder of this machine, with one folder or archive per model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from serving.errors import (
    ArtifactChanged,
    ModelNotInStore,
    NotAModel,
    StartError,
    StoreAccessDenied,
    StoreUnavailable,
    UrlNotAllowed,
)
from serving.names import archive_spellings, model_name, normal_name, spellings
from serving.store.catalog import (
    StoredFile,
    StoredModel,
    folder_model,
    holds_model,
    models_among,
    not_a_model,
)
from serving.store.disk import walk

CHUNK_BYTES = 1 << 20  # maximum size of one read of a file


class FolderStore:
    """Models in a folder of this machine: `<name>.tar.gz`, `<name>.mar`, or folders used in place.

    Links out of the folder are not followed, and links are not listed. Raises `StartError` if
    `root` is no folder, or none that this user can read.
    """

    def __init__(self, root: Path) -> None:
        try:
            os.stat(f"{root}/.")  # what is in it can be opened
        except PermissionError as error:
            raise StartError(f"MODEL_STORE: {closed_to_user(error)}") from None
        except OSError:
            raise StartError(f"MODEL_STORE is {root}, which is not a folder") from None
        self.root = root.resolve()
        self.location = str(self.root)

    def models(self) -> list[StoredModel]:
        return models_among(_files(self.root), lambda path: str(self.root / path).rstrip("/"))

    def find(self, name: str, handler: str | None = None) -> StoredModel:
        name = model_name(name)
        for archive in (self.root / spelling for spelling in archive_spellings(name)):
            if archive.is_file() and _resolved(archive, (self.root,)) is not None:
                return local_model(archive.resolve(), name)
        for path in (self.root / spelling for spelling in spellings(name)):
            if path.is_dir() and (folder := _resolved(path, (self.root,))) is not None:
                files = list(_files(folder, closed=False))
                if holds_model(files, handler):
                    return folder_model(name, str(folder), files)
                links = sum(entry.is_symlink() for entry in walk(folder, hidden=False))
                if files or links:
                    raise not_a_model(name, (file.path for file in files), links)
            if _resolved(path.parent, (self.root,)) is not None:
                _raise_for_alike(path, name, self.root)
        raise ModelNotInStore(f"there is no model {name} in the store")

    def file(self, path: str) -> StoredFile | None:
        resolved = _resolved(self.root / path, (self.root,))
        if resolved is None or not resolved.is_file():
            return None
        status = resolved.stat()
        return StoredFile(path, str(resolved), status.st_size, file_version(status))

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        return read_range(file, start, stop)


def find_path(path: Path, roots: tuple[Path, ...]) -> StoredModel:
    """Return the model at an absolute path to a folder or an archive under one of `roots`.

    Raises `UrlNotAllowed` if the path, with links and `..` resolved, is outside of `roots`, and
    `ModelNotInStore` if it does not exist.
    """
    resolved = _resolved(path, roots)
    if resolved is None:
        raise UrlNotAllowed(
            f"{path} is outside of {', '.join(map(str, roots)) or 'all model folders'}"
        )
    return local_model(resolved, normal_name(resolved.name))


def local_model(path: Path, name: str) -> StoredModel:
    """Return the model at a resolved path. Raises `ModelNotInStore`."""
    if path.is_dir():
        return folder_model(name, str(path), list(_files(path, closed=False)))
    try:
        status = path.stat()
    except OSError:
        raise ModelNotInStore(f"there is no model at {path}") from None
    return StoredModel(name, str(path), file_version(status), status.st_size, "archive")


def file_version(status: os.stat_result) -> str:
    """Return a file's version: its size and time of modification."""
    return f"{status.st_size}-{status.st_mtime_ns}"


def read_range(
    file: StoredFile, start: int, stop: int, opener: Callable[[str, int], int] | None = None
) -> Iterator[bytes]:
    """Read part of a local file as `Remote.read` does; `opener` is passed to `open`."""
    try:
        with open(file.address, "rb", buffering=0, opener=opener) as data:
            data.seek(start)
            while True:
                chunk = data.read(min(CHUNK_BYTES, stop - start))
                if file_version(os.fstat(data.fileno())) != file.version:  # it may change meanwhile
                    raise ArtifactChanged(f"{file.address} has changed; try again")
                if not chunk:
                    return
                start += len(chunk)
                yield chunk
    except FileNotFoundError:
        raise ModelNotInStore(f"there is no {file.address}") from None
    except PermissionError as error:
        raise StoreAccessDenied(closed_to_user(error)) from None
    except OSError as error:
        raise StoreUnavailable(f"{file.address} cannot be read: {error.strerror}") from None


def _raise_for_alike(path: Path, name: str, root: Path) -> None:
    """Raise `NotAModel` if a file or link in the store has the model's name, with any suffix."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        alike = [
            Path(entry.path)
            for entry in entries
            if (entry.name == path.name or entry.name.startswith(f"{path.name}."))
            and not entry.is_dir(follow_symlinks=False)
        ]
        if any(_resolved(file, (root,)) is None or not file.exists() for file in alike):
            raise NotAModel(
                f"{name} is a link out of the store, or to nothing: copy the model into the store"
            )
        if alike:
            raise not_a_model(name, [file.name for file in alike])


def _resolved(path: Path, roots: tuple[Path, ...]) -> Path | None:
    """Resolve links and `..` in a path; return None if the result is outside of `roots`."""
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte
        return None
    allowed = any(resolved.is_relative_to(root.resolve()) for root in roots)
    return resolved if allowed else None


def closed_to_user(error: PermissionError, place: str = "") -> str:
    """Explains why this process cannot read a model's file or folder, and what would help."""
    place = str(error.filename or place)
    return (
        f"user {os.geteuid()} cannot read {place}: let others read it (chmod -R a+rX), or run the"
        " server as its owner (docker run --user)"
    )


def _files(folder: Path, *, closed: bool = True) -> Iterator[StoredFile]:
    """Yield all files below a folder, except for hidden files and links.

    Raises `PermissionError` for a folder that this user cannot read, with `closed=False`.
    """
    for entry in walk(folder, hidden=False, closed=closed):
        with contextlib.suppress(OSError):
            if not entry.is_symlink():
                status = entry.stat(follow_symlinks=False)
                relative = entry.path.removeprefix(f"{folder}/")
                yield StoredFile(relative, entry.path, status.st_size, file_version(status))
