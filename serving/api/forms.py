"""Forms. Multi Model Server takes them apart itself, before any worker, with Netty's decoder: each
field is an object in the heap that all models share, and millions end it (CVE-2024-29025)."""

from __future__ import annotations

import re

from serving.errors import BadRequest

MAX_FIELDS = 1000
URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
NO_BYTE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
PART = re.compile(rb"content-disposition", re.IGNORECASE)


def check_form(content_type: str, body: bytes) -> None:
    """Raises `BadRequest` for a form that Multi Model Server could not take."""
    kind = content_type.partition(";")[0].strip().lower()
    fields = 0
    if kind == URLENCODED:
        fields = body.count(b"&") + 1
        if NO_BYTE.search(body):
            raise BadRequest("the form has a % that no two hexadecimal digits follow")
    elif kind.startswith(MULTIPART):
        fields = sum(1 for _ in PART.finditer(body))
    if fields > MAX_FIELDS:
        raise BadRequest(f"the form has {fields} fields, at most {MAX_FIELDS} are taken")
