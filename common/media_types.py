"""Parses the headers Content-Type and Accept."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import NotAcceptable, UnsupportedMediaType

JSON = "application/json"
TEXT = "text/plain"
JSON_LINES = "application/jsonlines"  # a JSON value a line
CSV = "text/csv"
# JSON with binary tensors behind it, and the parameter with the length of the JSON.
BINARY = "application/vnd.sagemaker-triton.binary+json"
HEADER_SIZE = "json-header-size"


def media_type(content_type: str | None) -> tuple[str, dict[str, str]]:
    """Return the media type and its parameters in lower case; JSON if there is no header.

    Raises `UnsupportedMediaType` for a charset that is not UTF-8.
    """
    kind, parameters = _split(content_type or JSON)
    charset = parameters.get("charset", "utf-8")
    if charset not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise UnsupportedMediaType(f"Content-Type has the charset {charset}, must be UTF-8")
    return kind, parameters


def ranges(accept: str | None) -> dict[str, float]:
    """Return the accepted media ranges with their weights `q`; `*/*` if there is no header."""
    weights = {}
    for part in (accept or "*/*").split(","):
        kind, parameters = _split(part)
        try:
            weights[kind] = float(parameters.get("q", 1))
        except ValueError:
            weights[kind] = 1.0
    return weights


def accepted(accept: str | None, offered: Sequence[str]) -> str:
    """Return the offered type with the highest weight in `accept`, the first of equals.

    Raises `NotAcceptable` if the client accepts none.
    """
    weights = ranges(accept)

    def weight(kind: str) -> float:
        names = (kind, f"{kind.split('/')[0]}/*", "*/*", "*")
        return next((weights[name] for name in names if name in weights), 0)

    best = max(offered, key=weight)
    if not weight(best):
        raise NotAcceptable(f"Accept is {accept}, can be {' or '.join(offered)}")
    return best


def _split(value: str) -> tuple[str, dict[str, str]]:
    kind, *options = value.lower().split(";")
    pairs = (option.partition("=") for option in options)
    return kind.strip(), {name.strip(): value.strip('" ') for name, _, value in pairs}
