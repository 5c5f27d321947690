"""Checks names of models and converts all spellings of a name to one normal form.

`소월`, `소월.tar.gz` and both in NFD (one code point per jamo, as macOS writes names) are the same
model. Names are normalized when they are read; all other code has only the normal form.
"""

from __future__ import annotations

import unicodedata

from common.model_files import is_hidden
from serving.errors import UrlNotAllowed

# Suffixes of archives; if a store has a model with both, the first takes precedence.
SUFFIXES = (".tar.gz", ".mar")
MAX_NAME_BYTES = 1000  # S3's keys end at 1,024


def normal_name(name: str) -> str:
    """Return the name in NFC and without `.tar.gz` or `.mar`. Idempotent."""
    while name.endswith(SUFFIXES):
        name = name.removesuffix(SUFFIXES[0]).removesuffix(SUFFIXES[1])
    return unicodedata.normalize("NFC", name)


def model_name(name: str) -> str:
    """Return the normal form of a model's name. Raises `UrlNotAllowed` if the name is invalid."""
    normal = normal_name(name)
    if not is_clean(normal):
        raise UrlNotAllowed(
            f"{name[:200]!r} is no model name: a name like sowol or team/sowol is, without"
            " empty or hidden parts, `..`, backslashes or control characters, of at most"
            f" {MAX_NAME_BYTES} bytes"
        )
    return normal


def is_clean(path: str) -> bool:
    """Return whether a relative path is safe to join to a folder and has no hidden parts."""
    if any(unicodedata.category(c) in ("Cc", "Cs") or c == "\\" for c in path):
        return False
    if len(path.encode()) > MAX_NAME_BYTES:
        return False
    return all(path.split("/")) and not is_hidden(path)


def spellings(name: str) -> tuple[str, ...]:
    """Return the NFC and NFD spellings of a normal name, either of which a store may have."""
    return tuple(dict.fromkeys((name, unicodedata.normalize("NFD", name))))


def archive_spellings(name: str) -> tuple[str, ...]:
    """Return the possible file names of a model's archive, in order of preference."""
    return tuple(spelling + suffix for spelling in spellings(name) for suffix in SUFFIXES)
