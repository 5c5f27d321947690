"""What a model may be called. One name for all the ways to spell it.

`소월`, `소월.tar.gz` and either of them as macOS writes it (one code point per jamo, NFD) are one
model: names are brought to their normal form where they come in, and only that is used inside.
"""

from __future__ import annotations

import unicodedata

from serving.errors import UrlNotAllowed

# What archives end with; the first one counts where a name has several.
SUFFIXES = (".tar.gz", ".mar")
MAX_NAME_BYTES = 1000  # S3's keys end at 1,024


def normal_name(name: str) -> str:
    """NFC, without `.tar.gz` or `.mar`; the same for what is normal already."""
    while name.endswith(SUFFIXES):
        name = name.removesuffix(SUFFIXES[0]).removesuffix(SUFFIXES[1])
    return unicodedata.normalize("NFC", name)


def model_name(name: str) -> str:
    """The normal form. Raises `UrlNotAllowed` for what can be no model's name."""
    normal = normal_name(name)
    if not is_clean(normal):
        raise UrlNotAllowed(
            f"{name[:200]!r} is no model name: a name like sowol or team/sowol is, without"
            " empty or hidden parts, `..`, backslashes or control characters, of at most"
            f" {MAX_NAME_BYTES} bytes"
        )
    return normal


def is_clean(path: str) -> bool:
    """Whether a relative path stays where it is put, whatever it is joined to."""
    if any(unicodedata.category(c) in ("Cc", "Cs") or c == "\\" for c in path):
        return False
    if len(path.encode()) > MAX_NAME_BYTES:
        return False
    return all(part and not part.startswith(".") for part in path.split("/"))


def spellings(name: str) -> tuple[str, ...]:
    """The ways in which a store may spell a normal name."""
    return tuple(dict.fromkeys((name, unicodedata.normalize("NFD", name))))


def archive_spellings(name: str) -> tuple[str, ...]:
    """The same of its archive, the one that counts first."""
    return tuple(spelling + suffix for spelling in spellings(name) for suffix in SUFFIXES)
