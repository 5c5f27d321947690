"""Settings: dataclasses whose fields are environment variables, read once per process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

from common.errors import SettingError

S = TypeVar("S")


def setting(
    variable: str, default: Any, help_text: str, option: str | None = None, also: str = ""
) -> Any:
    """Define a field of a settings class.

    `option` is for the command line; `also` is another variable, SageMaker's own, that is read
    if `variable` is not set. `kogpt2 settings` lists all for docs/reference/settings.md.
    """
    metadata = {"variable": variable, "help": help_text, "option": option, "also": also}
    return field(default=default, metadata=metadata)


def read_settings(kind: type[S], environment: Mapping[str, str] = os.environ) -> S:
    """Read the settings; an empty variable is not set. Raises `SettingError` with the variable."""
    values = {}
    for f in fields(kind):  # type: ignore[arg-type]
        for variable in (f.metadata["also"], f.metadata["variable"]):  # `variable` overrides `also`
            if text := environment.get(variable):
                values[f.name] = _parsed(variable, text, f.type)
    return kind(**values)


def comma_separated(text: str) -> list[str]:
    """Split a setting at its commas into entries, without spaces around them and empty ones."""
    return [entry for entry in map(str.strip, text.split(",")) if entry]


def _parsed(variable: str, text: str, kind: Any) -> Any:
    try:
        if kind == "int" and text.isdecimal():
            return int(text)
        if kind == "float" and 0 <= (number := float(text)) < math.inf:
            return number
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "str":
            return text
    except (ValueError, KeyError):
        pass
    known = {"int": "a whole number", "float": "a number from 0 on", "bool": "true or false"}
    raise SettingError(f"{variable} is {text!r}, must be {known[kind]}")
