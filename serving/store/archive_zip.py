"""Unpacks Multi Model Server's `.mar`, a zip, under the rules of `serving.store.archive_limits`."""

from __future__ import annotations

import stat
import struct
import zipfile
from typing import IO

from serving.errors import ArchiveError
from serving.store.archive_limits import MAX_FILES, Output

MAGIC = b"PK\x03\x04"
MAX_LIST_BYTES = 4 << 20  # zipfile reads the list of members into memory
END = b"PK\x05\x06"
END_BYTES, MAX_COMMENT_BYTES = 22, 65_535
LOCATOR, LOCATOR_BYTES = b"PK\x06\x07", 20  # the record before END that marks a zip64


def extract_zip(stream: IO[bytes], output: Output) -> None:
    """Unpack a zip from a seekable stream; see `serving.store.archive.extract`."""
    _check_list(stream)
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        output.check(len(members), sum(member.file_size for member in members))
        for member in members:
            _unpack(archive, member, output)
        output.finish()


def _check_list(stream: IO[bytes]) -> None:
    """Raise `ArchiveError` if the list of members is too large to be read into memory."""
    size = stream.seek(0, 2)
    start = max(size - END_BYTES - MAX_COMMENT_BYTES - LOCATOR_BYTES, 0)
    stream.seek(start)
    tail = b""
    while len(tail) < size - start and (data := stream.read(size - start - len(tail))):
        tail += data
    at = tail.rfind(END)
    if at < 0 or len(tail) - at < END_BYTES:
        raise ArchiveError("it has no end record: it is cut off, or no zip")
    if LOCATOR in tail[:at][-LOCATOR_BYTES:]:
        raise ArchiveError("it is a zip64, for more than 4 GiB; use a .tar.gz for such a model")
    count, list_bytes = struct.unpack("<HI", tail[at + 10 : at + 16])
    if count > MAX_FILES or list_bytes > MAX_LIST_BYTES:
        raise ArchiveError(
            f"it has more than {MAX_FILES} files, or their names more than {MAX_LIST_BYTES} bytes"
        )


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, output: Output) -> None:
    name = member.orig_filename  # unlike `filename`, it is not cut at a zero byte
    mode = member.external_attr >> 16
    if name.endswith(("/", "\\")):  # ZipInfo.is_dir fails without a name
        output.add_folder(name)
        return
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise ArchiveError(f"{name!r} is no file or folder")
    if member.flag_bits & 1:
        raise ArchiveError(f"{name!r} is encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveError(
            f"{name!r} uses compression method {member.compress_type}; use stored or deflate"
        )
    with archive.open(member) as source:
        output.add_file(name, source, member.file_size, bool(mode & 0o100))
