"""The folder of prepared models: its place, its files, its size limit."""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from common.trees import remove

NAME = ".prepared"
BUILDING = ".building-"
ABANDONED_AFTER_S = 3600
SOURCE = ".source.json"  # suffix of a manifest, see `engine.prepared.manifest`
MODEL = ".safetensors"  # suffix of a prepared model, see `engine.native.prepared`

logger = logging.getLogger(__name__)

_pruned: dict[Path, tuple[int, int]] = {}  # modification time and limit of the last `prune`

_artifacts: dict[Path, Any] = {}  # the artifact of each manifest, whose name is its path's hash


def cache_folder(artifact: Path, cache_dir: Path | None) -> Path | None:
    """Return `cache_dir` or the artifact's `.prepared`; None if others may write to the latter."""
    if cache_dir is not None:
        return cache_dir
    folder = artifact / NAME
    try:
        status = folder.lstat()
    except OSError:  # it does not exist yet, or writing to it will fail
        return folder
    ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH
    return folder if ours and stat.S_ISDIR(status.st_mode) else None


def hash_of(data: str | Iterable[Any]) -> str:
    """Return the hash of a text, or of buffers that are joined."""
    digest = blake3()
    pieces: Iterable[Any] = [os.fsencode(data)] if isinstance(data, str) else data
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def is_older_than_boot(path: Path) -> bool:
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return path.stat().st_mtime < booted_at


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if there is none or it cannot be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there is then moved to `path`. Raises `OSError`."""
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=path.parent) as building:
        file = Path(building) / path.name
        yield file
        file.replace(path)


def remove_abandoned(folder: Path) -> None:
    """Remove old temporary folders of processes that were killed in `written_whole`."""
    for path in folder.glob(BUILDING + "*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                remove(path)


def prune(folder: Path, max_bytes: int) -> None:
    """Remove the least recently loaded models until the rest takes at most `max_bytes`.

    The most recent one is never removed, and open ones stay usable. Does nothing where no file has
    changed since the last call.
    """
    with suppress(OSError):
        if _pruned.get(folder) == (folder.stat().st_mtime_ns, max_bytes):
            return
        models = [(path, path.stat()) for path in folder.glob("*" + MODEL)]
        models.sort(key=lambda model: model[1].st_mtime, reverse=True)
        total = 0
        for i, (path, status) in enumerate(models):
            total += 512 * status.st_blocks
            if total > max_bytes and i:
                logger.info("the prepared model %s is removed: not loaded for longest", path.stem)
                path.unlink(missing_ok=True)
        for source in folder.glob("*" + SOURCE):
            if source not in _artifacts:
                _artifacts[source] = read_object(source).get("path")
            artifact = _artifacts[source]
            if not isinstance(artifact, str) or not os.path.exists(artifact):
                source.unlink(missing_ok=True)
                del _artifacts[source]
        _pruned[folder] = (folder.stat().st_mtime_ns, max_bytes)
