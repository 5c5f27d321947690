"""Models' files for tests, and how archives are unpacked."""

from __future__ import annotations

from pathlib import Path

from serving.store.archive import extract

MAX_BYTES = 64 << 20


def touch(folder: Path, *paths: str) -> None:
    """Makes empty files, and the folders that they are in."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()


def unpack(archive: Path, folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with archive.open("rb") as stream:
        extract(stream, folder, archive.name, max_bytes)
