"""Checks bodies that are HTML forms before Multi Model Server parses them.

Multi Model Server parses forms with Netty's decoder, before any worker gets them: each field is an
object in the heap that all models share, and millions of them fill it (CVE-2024-29025). A form that
the decoder cannot parse would be answered with 500.
"""

from __future__ import annotations

import re

from serving.errors import BadRequest

MAX_FIELDS = 1000
MAX_HEAD_BYTES = 65_536  # heads of all parts together: Netty reads them byte by byte
URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
CHARSETS = {"utf-8", "us-ascii", "iso-8859-1", "euc-kr"}
ENCODINGS = {"7bit", "8bit", "binary"}
NO_BYTE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s";]{1,70}))', re.IGNORECASE)
CHARSET = re.compile(r'charset\s*=\s*"?([^\s";]*)', re.IGNORECASE)
DISPOSITION = re.compile(r'form-data\s*;(?:.*;)?\s*name=("[^"]+"|[^\s";]+)', re.IGNORECASE)
EXTENDED = re.compile(r"\*\s*=\s*(?!utf-8'[^';]*'(?:%[0-9A-F]{2}|[^%;])*(?:;|$))", re.IGNORECASE)


def check_form(content_type: str, body: bytes) -> None:
    """Raise `BadRequest` for a form that Multi Model Server cannot parse, or not cheaply."""
    kind, _, options = content_type.partition(";")
    kind = kind.strip().lower()
    if kind == URLENCODED:
        _check_charset(options)
        _check_count(body.count(b"&") + 1)
        if NO_BYTE.search(body):
            raise BadRequest("the form has a % that no two hexadecimal digits follow")
    elif kind.startswith(MULTIPART):
        _check_charset(options)
        _check_parts(options, body)


def _check_count(fields: int) -> None:
    if fields > MAX_FIELDS:
        raise BadRequest(f"the form has {fields} fields, at most {MAX_FIELDS} are taken")


def _check_charset(options: str) -> None:
    for charset in CHARSET.findall(options):
        if charset.lower() not in CHARSETS:
            known = ", ".join(sorted(CHARSETS))
            raise BadRequest(f"charset is {charset:.50}, must be one of {known}")


def _check_parts(options: str, body: bytes) -> None:
    """Check a multipart form (RFC 7578): `--boundary`, head, content; at the end `--boundary--`."""
    boundary = BOUNDARY.search(options)
    if boundary is None:
        raise BadRequest(f"Content-Type: {MULTIPART} needs boundary=, of at most 70 characters")
    delimiter = b"\r\n--" + (boundary[1] or boundary[2]).encode()
    whole = b"\r\n" + body
    _check_count(whole.count(delimiter) - 1)
    before, *parts = whole.split(delimiter)
    if before or not parts or not parts[-1].startswith(b"--"):
        begin = delimiter[2:].decode()
        raise BadRequest(f"the form must begin with {begin} and end with {begin}--")
    left = MAX_HEAD_BYTES
    for i, part in enumerate(parts[:-1], 1):
        head, blank, _ = part.partition(b"\r\n\r\n")
        left -= len(head)
        if left < 0:
            raise BadRequest(f"the heads of the form's parts have over {MAX_HEAD_BYTES} bytes")
        if not blank or not head.startswith(b"\r\n"):
            raise BadRequest(f"part {i} of the form has no head that an empty line ends")
        _check_head(i, head[2:].decode("utf-8", "replace"))


def _check_head(i: int, head: str) -> None:
    named = 0
    for line in head.split("\r\n"):
        name, colon, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not colon or not name or not line.isprintable():
            raise BadRequest(f"part {i} of the form has a header that is none: {line[:50]!r}")
        if name == "content-disposition":
            named += 1
            if not DISPOSITION.match(value) or EXTENDED.search(value):
                raise BadRequest(f'part {i} of the form must have form-data; name="..."')
        elif name == "content-type":
            if value.lower().startswith("multipart/"):
                raise BadRequest(f"part {i} of the form is {value:.50}: forms cannot be nested")
            _check_charset(value)
        elif name == "content-transfer-encoding" and value.lower() not in ENCODINGS:
            raise BadRequest(f"part {i} of the form is sent as {value:.50}, must be binary")
    if named != 1:
        raise BadRequest(f"part {i} of the form must have one Content-Disposition, has {named}")
