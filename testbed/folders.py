"""Makes folders that are complete or missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes `target` unless an error is raised."""
    folder = target.with_name(f".{target.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    folder.rename(target)
