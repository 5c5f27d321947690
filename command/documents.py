"""Reads and writes users' files. Imports the standard library only, so errors show at once."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

from command.errors import Problem

Documents = list[list[str]]  # each document is a list of its lines


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with or without a byte order mark. Raises `Problem`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Problem(
            f"{path} is not UTF-8 (byte {error.start});"
            " convert it, for example with: iconv -f cp949 -t utf-8"
        ) from None
    except OSError as error:
        raise Problem(f"cannot read {path}: {error.strerror}") from None


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work whose results it gets. Raises `Problem`."""
    code = 0
    if path.is_dir():
        code = errno.EISDIR
    elif not path.exists() and not path.absolute().parent.is_dir():
        code = errno.ENOENT
    elif not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        code = errno.EACCES
    if code:
        raise Problem(f"cannot write {path}: {os.strerror(code)}")


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """Write a JSON file in UTF-8. Raises `Problem`."""
    text = json.dumps(value, ensure_ascii=False, indent=indent) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Problem(f"cannot write {path}: {error.strerror}") from None


def read_documents(path: Path) -> Documents:
    """Read the documents of a UTF-8 file, which blank lines separate.

    Lines that begin with "# " are titles and left out. Raises `Problem`.
    """
    text = read_text(path)
    blocks = (
        [line.strip() for line in block.splitlines() if not line.startswith("# ")]
        for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    )
    documents = [document for lines in blocks if (document := [line for line in lines if line])]
    if not documents:
        raise Problem(f"{path} holds no text")
    return documents
