"""Parses JSON files that operators write: the tokens of teams, the aliases of a store."""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest, SettingError
from common.json_body import read_json


def parse_json(content: bytes, **options: Any) -> Any:
    """Parse the content of a JSON file; `options` are passed to `json.loads`.

    Raises `SettingError` with the line of a syntax error.
    """
    try:
        return read_json(content, source="it", **options)
    except InvalidRequest as error:
        raise SettingError(error.message) from None
