"""A folder as model store: one folder or archive per model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from serving.errors import ModelNotInStore, NotAModel, StartError, UrlNotAllowed
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


class FolderStore:
    """Models in a folder of this machine: `<name>.tar.gz` or `.mar`, or folders, used in place.

    Links that lead out of the folder are not followed; links are not listed. Raises `StartError`
    if there is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise StartError(f"MODEL_STORE is {root}, which is not a folder")
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
                files = list(_files(folder))
                if holds_model(files, handler):
                    return folder_model(name, str(folder), files)
                links = sum(entry.is_symlink() for entry in walk(folder, hidden=False))
                if files or links:
                    raise not_a_model(name, (file.path for file in files), links)
            if _resolved(path.parent, (self.root,)) is not None:
                _raise_for_alike(path, name, self.root)
        raise ModelNotInStore(f"there is no model {name} in the store")

    def file(self, path: str) -> StoredFile | None:
        found = _resolved(self.root / path, (self.root,))
        if found is None or not found.is_file():
            return None
        status = found.stat()
        return StoredFile(path, str(found), status.st_size, file_version(status))

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        yield Path(file.address).read_bytes()[start:stop]


def find_path(path: Path, roots: tuple[Path, ...]) -> StoredModel:
    """The model at an absolute path, a folder or an archive, under one of `roots`.

    Raises `UrlNotAllowed` if it lies elsewhere, also by way of links or `..`, and
    `ModelNotInStore` if nothing is there.
    """
    found = _resolved(path, roots)
    if found is None:
        raise UrlNotAllowed(f"{path} is outside of {', '.join(map(str, roots)) or 'what is known'}")
    return local_model(found, normal_name(found.name))


def local_model(path: Path, name: str) -> StoredModel:
    """The model at this resolved path. Raises `ModelNotInStore`."""
    if path.is_dir():
        return folder_model(name, str(path), list(_files(path)))
    try:
        found = path.stat()
    except OSError:
        raise ModelNotInStore(f"there is no model at {path}") from None
    return StoredModel(name, str(path), file_version(found), found.st_size, "archive")


def file_version(found: os.stat_result) -> str:
    """Changes when the file is written or replaced."""
    return f"{found.st_size}-{found.st_mtime_ns}"


def _raise_for_alike(path: Path, name: str, root: Path) -> None:
    """Raises `NotAModel` where a file or link beside others in the store is called so."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        alike = [
            Path(entry.path)
            for entry in entries
            if (entry.name == path.name or entry.name.startswith(f"{path.name}."))
            and not entry.is_dir(follow_symlinks=False)
        ]
        if any(_resolved(file, (root,)) is None or not file.exists() for file in alike):
            raise NotAModel(
                f"{name} is a link that leads out of the store, or nowhere: copy what it leads to"
            )
        if alike:
            raise not_a_model(name, [file.name for file in alike])


def _resolved(path: Path, roots: tuple[Path, ...]) -> Path | None:
    """`path` without links and `..`, if it then is one of `roots` or lies below."""
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte
        return None
    allowed = any(resolved.is_relative_to(root.resolve()) for root in roots)
    return resolved if allowed else None


def _files(folder: Path) -> Iterator[StoredFile]:
    """All files below, hidden ones and links left out."""
    for entry in walk(folder, hidden=False):
        with contextlib.suppress(OSError):
            if not entry.is_symlink():
                found = entry.stat(follow_symlinks=False)
                relative = entry.path.removeprefix(f"{folder}/")
                yield StoredFile(relative, entry.path, found.st_size, file_version(found))
