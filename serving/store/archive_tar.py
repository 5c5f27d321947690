"""Unpacks a `.tar.gz` under the rules of `serving.store.archive_limits`.

The gateway does it, not the engine's sandbox: it fetches and writes the files as they come, and a
sandbox can open no file to write. `tarfile`'s `filter="data"` bounds neither sizes nor headers.

`tarfile` parses only single headers here, for three reasons. Before Python 3.11.10 and 3.12.6 its
time is quadratic in the size of an extended header (CVE-2024-6232); it recurses for each extended
header of a member; and it reports that a file is sparse only after reading the map of its holes.
https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13
"""

from __future__ import annotations

import gzip
import posixpath
import tarfile
from collections.abc import Iterator
from typing import IO, Any

from serving.errors import ArchiveError
from serving.store.archive_limits import CHUNK_BYTES, Output

MAX_HEADER_BYTES = 16 << 20  # all extended headers (long names, attributes) of an archive together
MAX_PADDING_BYTES = 16 << 20  # zeros after the last member
MAX_DIGITS = 18  # digits of a number, which then fits into 64 bits
# The attributes of a `TarInfo` that extended headers in front of it replace, by kind and key.
GNU_FIELDS = {tarfile.GNUTYPE_LONGNAME: "name", tarfile.GNUTYPE_LONGLINK: "linkname"}
PAX_FIELDS = {b"path": "name", b"linkpath": "linkname", b"size": "size"}
EXTENSIONS = (*GNU_FIELDS, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)


def extract_tar(stream: IO[bytes], output: Output) -> None:
    """Unpack a tar.gz, reading it once from start to end; see `serving.store.archive.extract`."""
    with gzip.GzipFile("", "rb", fileobj=stream) as plain:
        for member in _members(plain):
            _unpack(plain, member, output)
        output.finish()
        _finish(plain)


def _members(plain: gzip.GzipFile) -> Iterator[tarfile.TarInfo]:
    """Yield members, extended headers applied; the caller reads a member's data in between."""
    fields: dict[str, Any] = {}  # values from extended headers, by attribute of the next member
    header_bytes = 0
    while (member := _header(plain)) is not None:
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse()
        if member.type not in EXTENSIONS:
            for attribute, value in fields.items():
                setattr(member, attribute, value)
            yield member
            fields = {}
            continue
        header_bytes += tarfile.BLOCKSIZE + member.size
        if member.size < 0 or header_bytes > MAX_HEADER_BYTES:
            raise ArchiveError(f"its extended headers have more than {MAX_HEADER_BYTES} bytes")
        fields |= _fields(member.type, _read(plain, member.size))
        _skip_padding(plain, member.size)
    if fields:
        raise ArchiveError("it ends after a header")


def _header(plain: gzip.GzipFile) -> tarfile.TarInfo | None:
    """Read the next header; return None at the end of the archive."""
    block = plain.read(tarfile.BLOCKSIZE)
    if not block or block == bytes(tarfile.BLOCKSIZE):
        return None
    if len(block) < tarfile.BLOCKSIZE:
        raise ArchiveError("it ends in the middle of a header")
    return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")


def _fields(kind: bytes, data: bytes) -> dict[str, Any]:
    """Parse an extended header into values by attribute of the next member."""
    if kind in GNU_FIELDS:
        return {GNU_FIELDS[kind]: _text(data.partition(b"\0")[0])}
    fields: dict[str, Any] = {}
    if kind == tarfile.XGLTYPE:  # global headers apply to all members: ignored
        return fields
    for key, value in _records(data):
        if key.startswith(b"GNU.sparse."):
            raise _sparse()
        if key in PAX_FIELDS:
            fields[PAX_FIELDS[key]] = _number(value) if key == b"size" else _text(value)
    return fields


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a pax header, whose records are `RECORD_LENGTH KEY=VALUE`."""
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


def _unpack(plain: gzip.GzipFile, member: tarfile.TarInfo, output: Output) -> None:
    name = member.name.rstrip("/") or member.name
    if member.isdir():
        output.add_folder(name)
    elif member.isreg():
        start = plain.tell()
        output.add_file(name, plain, member.size, bool(member.mode & 0o100))
        plain.seek(start + member.size)  # a skipped file's data was not read
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
    """Skip the padding of a member's `size` bytes to whole blocks."""
    plain.read(-size % tarfile.BLOCKSIZE)


def _finish(plain: gzip.GzipFile) -> None:
    """Read the padding up to the end of the stream, so that gzip verifies its checksum."""
    padding = 0
    while data := plain.read(CHUNK_BYTES):
        padding += len(data)
        if data.strip(b"\0") or padding > MAX_PADDING_BYTES:
            raise ArchiveError("it has data after its end")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _sparse() -> ArchiveError:
    return ArchiveError("it has a sparse file: pack it without --sparse")
