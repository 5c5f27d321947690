"""What every archive is held to, whatever its format."""

from __future__ import annotations

import posixpath

from serving.errors import ArchiveError

MAX_BYTES = 8 << 30
MAX_FILES = 10_000
CHUNK_BYTES = 256 << 10


def inside(path: str, member: str) -> str:
    """`path` without `.` and inner `..`. Raises `ArchiveError` if it leads out of the folder."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ArchiveError(f"a name in it is not UTF-8: {path!a}") from None
    normal = posixpath.normpath(path)
    leads_out = path.startswith("/") or normal == ".." or normal.startswith("../")
    if leads_out or "\0" in path or (path == member and ".." in path.split("/")):
        raise ArchiveError(f"{member!r} leads out of its folder")
    return normal
