"""Keeps a folder of prepared models (see `engine.prepared.cache`) within a bound."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engine.prepared.folder import FRAME, SOURCE, read_object

logger = logging.getLogger(__name__)

_pruned: dict[Path, tuple[int, int]] = {}  # when the folder had changed, and the bound


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Nothing is removed from `folder` inside, by whatever process."""
    with ExitStack() as stack:
        with suppress(OSError):  # there is no such folder and there can be none
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(folder, fcntl.LOCK_SH))
        yield


def prune(folder: Path, max_bytes: int) -> None:
    """Removes the models that were not loaded for longest until the rest takes `max_bytes` at most,
    and files that belong to none. Put off to the next time if somebody uses the folder just now;
    nothing to do where no file has come or gone since the last time.
    """
    with suppress(OSError):
        now = (folder.stat().st_mtime_ns, max_bytes)
        if _pruned.get(folder) != now:
            with _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _prune(folder, max_bytes)
            _pruned[folder] = now


@contextmanager
def _lock(folder: Path, operation: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _prune(folder: Path, max_bytes: int) -> None:
    sizes = {path.name: 512 * path.stat().st_blocks for path in _blobs(folder)}
    frames = {path.name: _files(path) for path in folder.glob("*" + FRAME)}
    kept: set[str] = set()
    entries = [p for p in folder.glob("*.json") if not p.name.endswith((SOURCE, FRAME))]
    for entry in sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True):
        frame = str(read_object(entry).get("frame"))
        files = _files(entry) | {frame} | frames.get(frame, set())
        if sum(sizes.get(name, 0) for name in kept | files) > max_bytes and kept:
            logger.info("the prepared model %s is removed: not loaded for longest", entry.stem)
            entry.unlink()
        else:
            kept |= files
    for name in sizes.keys() - kept:
        (folder / name).unlink()
    for frame in frames.keys() - kept:
        (folder / frame).unlink()
    for source in folder.glob("*" + SOURCE):
        if not _is_there(source):
            source.unlink()


def _blobs(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (".bin", ".onnx")]


def _files(entry: Path) -> set[str]:
    files = read_object(entry).get("files")
    return set(files) if isinstance(files, dict) else set()


def _is_there(source: Path) -> bool:
    """Whether the artifact that `source` speaks of still exists."""
    path = read_object(source).get("path")
    return isinstance(path, str) and os.path.exists(path)
