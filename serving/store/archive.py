"""Unpacks a model's `.tar.gz`: nothing outside its folder, all of it or nothing."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from serving.errors import ArchiveError

MAX_BYTES = 8 << 30
MAX_FILES = 10_000


def unpack(archive: Path, folder: Path) -> None:
    """Replaces `folder` by the content of `archive`. Raises `ArchiveError`; then nothing changed.

    Refused before anything is written: absolute paths, `..`, links out, devices, more than
    `MAX_FILES` files or `MAX_BYTES` bytes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        try:
            with tarfile.open(archive, "r:*") as tar:
                members = [tarfile.data_filter(m, str(fresh)) for m in _bounded(tar)]
                tar.extractall(fresh, members=members, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ArchiveError(f"{archive.name} cannot be unpacked: {error}") from error
        fresh.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _bounded(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    members: list[tarfile.TarInfo] = []
    size = 0
    for member in tar:
        members.append(member)
        size += member.size
        if len(members) > MAX_FILES or size > MAX_BYTES:
            raise ArchiveError(
                f"the archive has more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB"
            )
    return members
