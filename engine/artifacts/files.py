"""Opens the foreign files of an artifact: only plain files, of bounded length."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Open a plain file; a pipe could block. Raises `FileNotFoundError`, `ArtifactError`."""
    with readable(path.name, but=(FileNotFoundError,)):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path.name} is no plain file, but must be")
        opener = lambda name, flags: os.open(name, flags | os.O_NONBLOCK)  # noqa: E731
        file = open(str(path), "rb", opener=opener)  # noqa: SIM115
        if status.st_size < MAX_POINTER_BYTES and file.read(len(LFS)) == LFS:
            file.close()
            raise ArtifactError(
                f"{path.name} is a pointer of Git LFS, not the file itself: fetch that with"
                " git lfs pull"
            )
        file.seek(0)
        return file


@contextmanager
def readable(name: object, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Turn an `OSError`, except classes in `but`, into an `ArtifactError` or `OutOfMemory`."""
    try:
        yield
    except but:
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise OutOfMemory(f"there is no memory to read {name}") from error
        reason = str(error.strerror or error)
        if error.errno == errno.EACCES:
            reason += (
                f" for user {os.geteuid()}: let others read it (chmod -R a+rX on the model's"
                " folder), or run the server as its owner (docker run --user)"
            )
        raise ArtifactError(f"{name} cannot be read: {reason}") from None


def map_file(path: Path, advice: int = mmap.MADV_NORMAL) -> NDArray[np.uint8]:
    """Map a file's bytes. Raises `ArtifactError`, and `OutOfMemory` without address space."""
    try:
        with open_file(path) as file, readable(path.name):
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, dtype=np.uint8)
            data = np.memmap(file, np.uint8, "r")
    except FileNotFoundError:
        raise ArtifactError(f"there is no {path.name}") from None
    if advice != mmap.MADV_NORMAL:
        data._mmap.madvise(advice)  # type: ignore[attr-defined]
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file, `{}` if there is no file. Raises `ArtifactError`."""
    try:
        return parse_json(read_file(path), path.name)
    except FileNotFoundError:
        return {}


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a file's content. Raises `ArtifactError`, `FileNotFoundError`."""
    with open_file(path) as file, readable(path.name):
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ArtifactError(f"{path.name} is longer than {max_bytes >> 20} MiB")
        return file.read(size)


def parse_json(content: bytes, file: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ArtifactError` that names `file`."""
    try:
        value = read_body(content, source=file)
    except InvalidRequest as error:
        raise ArtifactError(error.message) from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{file} must be a JSON object")
    return value
