"""Entries of a folder of prepared models: what each says, and the files that it consists of.

A file whose size or time is not what its entry says is checked against its name.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.prepared.files import Store, hash_of, is_whole
from engine.prepared.folder import BUILDING, read_object, write_object

THREADS = 2
# Of an entry that is not there, or not what this code writes.
MALFORMED = (KeyError, TypeError, AttributeError, ValueError, OSError)

logger = logging.getLogger(__name__)


def read_entry(path: Path) -> dict[str, Any]:
    """What an entry says, if its files are whole. Raises one of `MALFORMED` if not."""
    folder, entry = path.parent, read_object(path)
    files: dict[str, list[int]] = entry["files"]
    if entry["said"] != _said(entry):  # what is mapped, and from where, is not looked at again
        raise ValueError(path)
    changed = [name for name, stamp in files.items() if _stamp(folder / name) != stamp]
    if changed:
        with ThreadPoolExecutor(THREADS) as pool:
            whole = all(pool.map(lambda name: is_whole(folder / name), changed))
        if not whole:
            logger.warning("%s is damaged and is made anew", path)
            raise ValueError(path)
        # A copied cache has other times: remember them, if we may.
        entry["files"] = {name: _stamp(folder / name) for name in files}
        with suppress(OSError):
            write_object(path, entry)
    return entry


def is_there(path: Path, read: Callable[[Path], object]) -> bool:
    """Whether there is an entry that `read` can read, which raises one of `MALFORMED` if not: one
    that another build of this code wrote may say too little, and its files be whole."""
    try:
        read(path)
    except MALFORMED:
        return False
    return True


def _said(entry: dict[str, Any]) -> str:
    """The hash of an entry, without the times of its files, which may change."""
    said = {key: value for key, value in entry.items() if key not in ("files", "said")}
    return hash_of(json.dumps([said, sorted(entry["files"])], sort_keys=True))


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def make_entry(path: Path, make: Callable[[Store], dict[str, Any]]) -> None:
    """Writes an entry and its files. Raises `OSError`."""
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=path.parent) as building:
        store = Store(path.parent, Path(building))
        made = make(store)
        made["files"] = {name: _stamp(path.parent / name) for name in sorted(store.names)}
        write_object(path, made | {"said": _said(made)})
