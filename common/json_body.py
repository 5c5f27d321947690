"""Parses the JSON of bodies and files into values whose texts UTF-8 can encode."""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from common.errors import InvalidRequest

# JSON can escape half a surrogate pair, which is no character and has no UTF-8.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Limit of names and values in a request to a text model: enough for a bias for each token of a
# vocabulary, or the ids of 64 prompts. A parsed value may take 70 times the bytes of its JSON.
MAX_VALUES = 131_072
MARKS = ",:[{"  # outside of strings, one precedes each name or value but the first


def read_text(body: bytes | bytearray | str, source: str = "the body") -> str:
    """Decode a body or file, without the byte order mark that Windows puts before UTF-8.

    Raises `InvalidRequest`, which names `source`, for what is not UTF-8 or has half a surrogate
    pair.
    """
    try:
        if isinstance(body, str):
            body.encode("utf-8")
            text = body
        else:
            text = bytes(body).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{source} is not UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError as error:
        raise _half(error, source) from None
    return text.removeprefix("\ufeff")


def check_count(body: bytes | bytearray | str, most: int = MAX_VALUES) -> None:
    """Raise `InvalidRequest` for JSON with more than `most` names and values, before parsing."""
    if isinstance(body, str):
        marks = sum(map(body.count, MARKS))
    else:
        marks = sum(map(body.count, MARKS.encode()))
    if marks < most:  # few enough, even if marks inside strings count
        return
    text, count, at = read_text(body), 0, 0
    for _ in range(most):  # each string is a name or a value
        begin = text.find('"', at)
        count += sum(text.count(mark, at, len(text) if begin < 0 else begin) for mark in MARKS)
        if begin < 0 or count >= most:
            break
        try:
            _, at = scanstring(text, begin + 1, False)
        except ValueError:
            return  # not JSON: parsing will raise that
    else:
        count = most
    if count >= most:
        raise InvalidRequest(f"the body has more than {most} values")


def read_json(
    body: bytes | bytearray | str,
    most: int | None = None,
    source: str = "the body",
    **options: Any,
) -> Any:
    """Parse the JSON of a body or file; `options` are passed to `json.loads`.

    Raises `InvalidRequest`, which names `source`, for anything but JSON, for half surrogate pairs,
    and for more than `most` names and values.
    """
    if most is not None:
        check_count(body, most)
    text = read_text(body, source)
    try:
        value = json.loads(text, **options)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _half(error, source) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{source} is not JSON: {error}") from None
    return value


def _half(error: UnicodeEncodeError, source: str) -> InvalidRequest:
    code = ord(error.object[error.start])
    return InvalidRequest(
        f"{source} holds \\u{code:04x}, half a surrogate pair, which is no character"
    )
