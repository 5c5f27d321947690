"""Opens the files of an artifact, which may be anything: only plain files, of bounded length."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError, InvalidRequest, OutOfMemory
from common.json_body import read_json as read_body

MAX_JSON_BYTES = 16 << 20
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
LFS, MAX_POINTER_BYTES = b"version https://git-lfs.github.com/spec/v1", 1024


def open_file(path: Path) -> BinaryIO:
    """For reading. Raises `FileNotFoundError`, and `ArtifactError` for what is no plain file: a
    pipe would be waited for."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactError(f"{path.name} is no plain file, but must be")
        if found.st_size < MAX_POINTER_BYTES and _begins_with(path, LFS):
            raise ArtifactError(
                f"{path.name} is a pointer of Git LFS, not the file itself: fetch that with"
                " git lfs pull"
            )
        return open(str(path), "rb", opener=_without_waiting)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read: {why(error)}") from None


def why(error: OSError) -> str:
    """The system's reason, and for files of another user what helps: save_pretrained writes weights
    that only their owner may read."""
    if error.errno != errno.EACCES:
        return str(error.strerror or error)
    return (
        f"{error.strerror} for user {os.geteuid()}: let others read it (chmod -R a+rX on the"
        " model's folder), or run the server as its owner (docker run --user)"
    )


def _begins_with(path: Path, text: bytes) -> bool:
    with open(str(path), "rb", opener=_without_waiting) as file:
        return file.read(len(text)) == text


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def map_file(path: Path, advice: int = mmap.MADV_NORMAL) -> NDArray[np.uint8]:
    """A file's bytes, mapped. Raises `ArtifactError`, and `OutOfMemory` where there is no room."""
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, dtype=np.uint8)
            data = np.memmap(file, np.uint8, "r")
    except FileNotFoundError:
        raise ArtifactError(f"there is no {path.name}") from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise OutOfMemory(f"there is no memory to map {path.name}") from error
        raise ArtifactError(f"{path.name} cannot be read: {why(error)}") from None
    if advice != mmap.MADV_NORMAL:
        data._mmap.madvise(advice)  # type: ignore[attr-defined]
    return data


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file, nothing if there is no file. Raises `ArtifactError`."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise ArtifactError(f"{path.name} is longer than {MAX_JSON_BYTES >> 20} MiB")
            content = file.read(size)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read: {why(error)}") from None
    return parse_json(content, path.name)


def parse_json(content: bytes, file: str) -> dict[str, Any]:
    """An object. Raises `ArtifactError` that names `file`."""
    try:
        value = read_body(content)
    except InvalidRequest as error:
        raise ArtifactError(error.message.replace("the body", file, 1)) from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{file} must be a JSON object")
    return value
