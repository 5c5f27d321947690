"""Parses JSON files that operators write: the tokens of teams, the aliases of a store."""

from __future__ import annotations

import json
from typing import Any

from common.errors import SettingError


def parse_json(content: bytes, **options: Any) -> Any:
    """Parses a file's content, with the options of `json.loads`.

    Raises `SettingError` with the line of what is wrong.
    """
    try:
        return json.loads(content, **options)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise SettingError(f"it is no JSON in UTF-8{where}") from None
