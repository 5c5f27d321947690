"""JSON that somebody sends, as values whose texts can all be written again."""

from __future__ import annotations

import json
import re
from typing import Any

from common.errors import InvalidRequest

# JSON can escape half a surrogate pair, which is no character and has no UTF-8.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


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


def read_json(body: bytes | bytearray | str) -> Any:
    """The body's value. Raises `InvalidRequest`, also for names and texts that have no UTF-8."""
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
