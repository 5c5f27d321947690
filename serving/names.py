"""Model names: which are valid, and one normal form for all spellings.

`소월`, `소월.tar.gz` and either of them as macOS writes it (one code point per jamo, NFD) are one
model: names are normalized where they come in, and only the normal form is used inside.
"""

from __future__ import annotations

import unicodedata

from serving.errors import UrlNotAllowed

# Of archives; where a store has both, the first is used.
SUFFIXES = (".tar.gz", ".mar")
MAX_NAME_BYTES = 1000  # S3's keys end at 1,024


def normal_name(name: str) -> str:
    """The name in NFC without `.tar.gz` or `.mar`; idempotent."""
    while name.endswith(SUFFIXES):
        name = name.removesuffix(SUFFIXES[0]).removesuffix(SUFFIXES[1])
    return unicodedata.normalize("NFC", name)


def model_name(name: str) -> str:
    """The normal form of a name. Raises `UrlNotAllowed` if it is invalid."""
    normal = normal_name(name)
    if not is_clean(normal):
        raise UrlNotAllowed(
            f"{name[:200]!r} is no model name: a name like sowol or team/sowol is, without"
            " empty or hidden parts, `..`, backslashes or control characters, of at most"
            f" {MAX_NAME_BYTES} bytes"
        )
    return normal


def is_clean(path: str) -> bool:
    """Whether a relative path stays below any folder that it is joined to, and is not hidden."""
    if any(unicodedata.category(c) in ("Cc", "Cs") or c == "\\" for c in path):
        return False
    if len(path.encode()) > MAX_NAME_BYTES:
        return False
    return all(part and not part.startswith(".") for part in path.split("/"))


def spellings(name: str) -> tuple[str, ...]:
    """The ways in which a store may spell a normal name."""
    return tuple(dict.fromkeys((name, unicodedata.normalize("NFD", name))))


def archive_spellings(name: str) -> tuple[str, ...]:
    """The file names of its archive, in order of preference."""
    return tuple(spelling + suffix for spelling in spellings(name) for suffix in SUFFIXES)
