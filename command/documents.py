"""Reads the texts that people give to scripts. Needs Python alone, so mistakes show at once."""

from __future__ import annotations

import re
from pathlib import Path

from command.errors import Problem

Documents = list[list[str]]  # the lines of each


def read_text(path: Path) -> str:
    """A UTF-8 file, with or without a mark of that at its beginning. Raises `Problem`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Problem(
            f"{path} is not UTF-8 (byte {error.start});"
            " convert it, for example with: iconv -f cp949 -t utf-8"
        ) from None
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}") from None


def read_documents(path: Path) -> Documents:
    """The documents of a UTF-8 file: blank lines part them, lines that begin with "# " are titles.

    Raises `Problem`.
    """
    text = read_text(path)
    blocks = (
        [line.strip() for line in block.splitlines() if not line.startswith("# ")]
        for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    )
    documents = [kept for lines in blocks if (kept := [line for line in lines if line])]
    if not documents:
        raise Problem(f"{path} holds no text")
    return documents
