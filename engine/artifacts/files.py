"""Opens the foreign files of an artifact: only plain files, of bounded length."""

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
    """Open a plain file: a pipe would block. Raises `FileNotFoundError`, `ArtifactError`."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path.name} is no plain file, but must be")
        file = open(str(path), "rb", opener=_open_nonblocking)  # noqa: SIM115
        if status.st_size < MAX_POINTER_BYTES and file.read(len(LFS)) == LFS:
            file.close()
            raise ArtifactError(
                f"{path.name} is a pointer of Git LFS, not the file itself: fetch that with"
                " git lfs pull"
            )
        file.seek(0)
        return file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read: {why(error)}") from None


def why(error: OSError) -> str:
    """The reason of an error, with advice for files that only another user may read."""
    if error.errno != errno.EACCES:
        return str(error.strerror or error)
    return (
        f"{error.strerror} for user {os.geteuid()}: let others read it (chmod -R a+rX on the"
        " model's folder), or run the server as its owner (docker run --user)"
    )


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def map_file(path: Path, advice: int = mmap.MADV_NORMAL) -> NDArray[np.uint8]:
    """A file's bytes, mapped. Raises `ArtifactError`, and `OutOfMemory` without address space."""
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
    """The object in a file, empty without a file. Raises `ArtifactError`."""
    try:
        return parse_json(read_file(path), path.name)
    except FileNotFoundError:
        return {}


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """A file's content. Raises `ArtifactError`, and `FileNotFoundError`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ArtifactError(f"{path.name} is longer than {max_bytes >> 20} MiB")
        try:
            return file.read(size)
        except OSError as error:
            raise ArtifactError(f"{path.name} cannot be read: {why(error)}") from None


def parse_json(content: bytes, file: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ArtifactError` that names `file`."""
    try:
        value = read_body(content)
    except InvalidRequest as error:
        raise ArtifactError(error.message.replace("the body", file, 1)) from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{file} must be a JSON object")
    return value
