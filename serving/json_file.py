"""Parses JSON files that operators write: the tokens of teams, the aliases of a store."""

from __future__ import annotations

import json
from typing import Any

from common.errors import SettingError


def parse_json(content: bytes, **options: Any) -> Any:
    """Parses the content of a JSON file; `options` are passed to `json.loads`.

    Raises `SettingError` with the line of a syntax error.
    """
    try:
        return json.loads(content, **options)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise SettingError(f"it is no JSON in UTF-8{where}") from None
