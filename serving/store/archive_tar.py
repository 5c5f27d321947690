"""Unpacks a `.tar.gz` under the rules of `serving.store.archive_limits`.

`tarfile` reads single headers here, not the archive: on Pythons before 3.11.10 and 3.12.6 it takes
time quadratic in the size of an extended header (CVE-2024-6232), on all of them it recurses for
each header in front of a member, and it hides that a file is sparse until it has read the map.
https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13
"""

from __future__ import annotations

import gzip
import posixpath
import tarfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from serving.errors import ArchiveError
from serving.store.archive_limits import CHUNK_BYTES, Output

# Of all headers in front of members together: long names, extended attributes.
MAX_HEADER_BYTES = 16 << 20
MAX_PADDING_BYTES = 16 << 20
MAX_DIGITS = 18
EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.XGLTYPE,
)


class Extended(NamedTuple):
    """What the headers in front of a member say of it, instead of its own."""

    name: str | None = None
    linked: str | None = None
    size: int | None = None


def extract_tar(stream: IO[bytes], output: Output) -> None:
    """Reads `stream` once, forwards. Raises what `serving.store.archive.extract` turns into
    `ArchiveError`."""
    with gzip.GzipFile("", "rb", fileobj=stream) as plain:
        for member in _members(plain):
            _unpack(plain, member, output)
        output.finish()
        _finish(plain)


def _members(plain: gzip.GzipFile) -> Iterator[tarfile.TarInfo]:
    """Each once all before it has been read, with what the headers in front of it say."""
    extended, header_bytes = Extended(), 0
    while (member := _header(plain)) is not None:
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse()
        if member.type not in EXTENSIONS:
            yield _told(member, extended)
            extended = Extended()
            continue
        header_bytes += tarfile.BLOCKSIZE + member.size
        if member.size < 0 or header_bytes > MAX_HEADER_BYTES:
            raise ArchiveError(f"it has headers of more than {MAX_HEADER_BYTES} bytes")
        extended = _extended(member.type, _read(plain, member.size), extended)
        _skip_padding(plain, member.size)
    if extended != Extended():
        raise ArchiveError("it ends after a header")


def _header(plain: gzip.GzipFile) -> tarfile.TarInfo | None:
    """None at the end."""
    block = plain.read(tarfile.BLOCKSIZE)
    if not block or block == bytes(tarfile.BLOCKSIZE):
        return None
    if len(block) < tarfile.BLOCKSIZE:
        raise ArchiveError("it ends in the middle of a header")
    return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")


def _extended(kind: bytes, data: bytes, extended: Extended) -> Extended:
    if kind == tarfile.GNUTYPE_LONGNAME:
        return extended._replace(name=_text(data.partition(b"\0")[0]))
    if kind == tarfile.GNUTYPE_LONGLINK:
        return extended._replace(linked=_text(data.partition(b"\0")[0]))
    if kind == tarfile.XGLTYPE:  # what holds for all members says nothing of one
        return extended
    for key, value in _records(data):
        if key.startswith(b"GNU.sparse."):
            raise _sparse()
        if key == b"path":
            extended = extended._replace(name=_text(value))
        elif key == b"linkpath":
            extended = extended._replace(linked=_text(value))
        elif key == b"size":
            extended = extended._replace(size=_number(value))
    return extended


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Of a pax header: length, key and value of each, the length that of the whole record."""
    at = 0
    while at < len(data) and data[at]:
        digits, space, _ = data[at : at + MAX_DIGITS].partition(b" ")
        end = at + _number(digits)
        key, equals, value = data[at + len(digits) + 1 : end].partition(b"=")
        if not space or not equals or not value.endswith(b"\n") or end > len(data):
            raise ArchiveError("it has a damaged header")
        yield key, value[:-1]
        at = end


def _number(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > MAX_DIGITS:
        raise ArchiveError("it has a damaged header")
    return int(digits)


def _told(member: tarfile.TarInfo, extended: Extended) -> tarfile.TarInfo:
    if extended.name is not None:
        member.name = extended.name
    if extended.linked is not None:
        member.linkname = extended.linked
    if extended.size is not None:
        member.size = extended.size
    return member


def _unpack(plain: gzip.GzipFile, member: tarfile.TarInfo, output: Output) -> None:
    name = member.name.rstrip("/") or member.name
    if member.isdir():
        output.add_folder(name)
    elif member.isreg():
        start = plain.tell()
        output.add_file(name, plain, member.size, bool(member.mode & 0o100))
        plain.seek(start + member.size)  # past what was left out
        _skip_padding(plain, member.size)
    elif member.issym():
        output.add_link(name, posixpath.join(posixpath.dirname(name), member.linkname))
    elif member.islnk():
        output.add_link(name, member.linkname)
    else:
        raise ArchiveError(f"{name!r} is no file, folder or link")


def _read(plain: gzip.GzipFile, size: int) -> bytes:
    data = plain.read(size)
    if len(data) < size:
        raise ArchiveError("it ends in the middle of a header")
    return data


def _skip_padding(plain: gzip.GzipFile, size: int) -> None:
    """To the end of the block, after `size` bytes."""
    plain.read(-size % tarfile.BLOCKSIZE)


def _finish(plain: gzip.GzipFile) -> None:
    """Reads to the end, where gzip's check sum is."""
    padding = 0
    while data := plain.read(CHUNK_BYTES):
        padding += len(data)
        if data.strip(b"\0") or padding > MAX_PADDING_BYTES:
            raise ArchiveError("more data follows where it should end")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _sparse() -> ArchiveError:
    return ArchiveError("it has a sparse file: pack it without --sparse")
