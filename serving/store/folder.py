"""A folder as model store: one folder or `.tar.gz` per model."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from serving.errors import ArchiveError, StartError
from serving.store.archive import unpack

logger = logging.getLogger(__name__)

SUFFIX = ".tar.gz"


def provide(store: Path, models: Path) -> list[str]:
    """Makes every model of `store` a folder in `models`; returns their names.

    Archives are unpacked unless that was done before; folders become links. An archive that cannot
    be unpacked is logged and left out.
    """
    if not store.is_dir():
        raise StartError(f"MODEL_STORE is {store}, which is not a folder")
    models.mkdir(parents=True, exist_ok=True)
    names = []
    for entry in sorted(store.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and any(entry.glob("*.params")):
            _link(entry, models / entry.name)
            names.append(entry.name)
        elif entry.name.endswith(SUFFIX):
            name = entry.name.removesuffix(SUFFIX)
            try:
                _unpack_once(entry, models / name)
                names.append(name)
            except ArchiveError as error:
                logger.error("%s", error.message)
    return names


def _link(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if target.is_symlink() and target.resolve() == source.resolve():
            return
        target.unlink()
    os.symlink(source.resolve(), target)


def _unpack_once(archive: Path, folder: Path) -> None:
    stamp = folder.parent / f".{folder.name}.stamp"
    found = archive.stat()
    version = f"{archive.resolve()} {found.st_size} {found.st_mtime_ns}"
    if folder.is_dir() and stamp.is_file() and stamp.read_text() == version:
        return
    if folder.is_symlink():
        folder.unlink()
    unpack(archive, folder)
    stamp.write_text(version)
