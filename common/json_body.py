"""Parses JSON bodies, into values whose texts can be encoded again."""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from common.errors import InvalidRequest

# JSON can escape half a surrogate pair, which is no character and has no UTF-8.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Names and values of a request for texts: a bias for each token of a vocabulary, or the ids of 64
# prompts, fit. As Python's objects a value may take 70 times its bytes.
MAX_VALUES = 131_072
MARKS = ",:[{"  # one in front of each value but the first, outside of texts


def read_text(body: bytes | bytearray | str) -> str:
    """The body as text. Raises `InvalidRequest` where it is not UTF-8."""
    try:
        if not isinstance(body, str):
            return bytes(body).decode("utf-8")
        body.encode("utf-8")
        return body
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError as error:
        raise _half(error) from None


def check_count(body: bytes | bytearray | str, most: int = MAX_VALUES) -> None:
    """Raise `InvalidRequest` for JSON with more values, before any of them is made."""
    if isinstance(body, str):
        marks = sum(map(body.count, MARKS))
    else:
        marks = sum(map(body.count, MARKS.encode()))
    if marks < most:  # texts and all
        return
    text, count, at = read_text(body), 0, 0
    for _ in range(most):  # a text is a value
        begin = text.find('"', at)
        count += sum(text.count(mark, at, len(text) if begin < 0 else begin) for mark in MARKS)
        if begin < 0 or count >= most:
            break
        try:
            _, at = scanstring(text, begin + 1, False)
        except ValueError:
            return  # it is no JSON
    else:
        count = most
    if count >= most:
        raise InvalidRequest(f"the body has more than {most} values")


def read_json(body: bytes | bytearray | str, most: int | None = None) -> Any:
    """Parse a body.

    Raises `InvalidRequest`, also for names and texts without UTF-8, and for more than `most`
    values.
    """
    if most is not None:
        check_count(body, most)
    text = read_text(body)
    try:
        value = json.loads(text)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _half(error) from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    return value


def _half(error: UnicodeEncodeError) -> InvalidRequest:
    code = ord(error.object[error.start])
    return InvalidRequest(
        f"the body holds \\u{code:04x}, half a surrogate pair, which is no character"
    )
