"""The folder that prepared models are kept in: where it is, whose it is, its JSON files."""

from __future__ import annotations

import atexit
import json
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.trees import remove

NAME = ".prepared"
BUILDING = ".building-"
ABANDONED_AFTER_S = 3600
SOURCE = ".source.json"
FRAME = ".frame.json"

_own: Path | None = None


def cache_folder(artifact: Path, cache_dir: Path | None) -> Path | None:
    """`cache_dir`, or `.prepared` in the artifact's folder; none where that is not to be trusted.

    What is in it is opened without another look, so it must have been put there by this user or by
    root, not by whoever made the artifact.
    """
    if cache_dir is not None:
        return cache_dir
    folder = artifact / NAME
    try:
        found = folder.lstat()
    except OSError:  # it can be made, or it cannot
        return folder
    ours = found.st_uid in (0, os.geteuid()) and not found.st_mode & stat.S_IWOTH
    return folder if ours and stat.S_ISDIR(found.st_mode) else None


def own_folder() -> Path | None:
    """This process's, until it ends; none where no temporary files can be written."""
    global _own
    if _own is None:
        with suppress(OSError):
            _own = Path(tempfile.mkdtemp(prefix="frames-"))
            atexit.register(remove, _own)
    return _own


def read_object(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file, or no object in it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all. Raises `OSError`."""
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=path.parent) as building:
        file = Path(building) / path.name
        file.write_text(json.dumps(value), encoding="utf-8")
        file.replace(path)


def remove_abandoned(folder: Path) -> None:
    """Removes what a builder that was killed left behind."""
    for path in folder.glob(BUILDING + "*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                remove(path)
