"""The settings of one model, from its load request or a `serving.json` among its files.

The request's settings take precedence. docs/models/model-settings.md describes them for users.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest, quoted
from common.json_body import read_json
from serving.errors import BadRequest

FILE = "serving.json"
MAX_FILE_BYTES = 65_536
MAX_SECONDS = 3600.0


def _setting(help_text: str, **schema: Any) -> Any:
    return field(default=None, metadata={"schema": {**schema, "description": help_text}})


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model; None stands for the server's default."""

    base: str | None = _setting(
        "of an adapter or a fine-tune: its base, a name or `url` as for loading, in place of the"
        " one that it was trained on",
        type="string",
        maxLength=1024,
    )
    share: bool | None = _setting(
        "false: a fine-tune is served whole, not as a delta of its base", type="boolean"
    )
    pinned: bool | None = _setting(
        "never unloaded to make room for another, nor for being idle", type="boolean"
    )
    backend: str | None = _setting(
        "what computes it, in place of `ENGINE_BACKEND`",
        type="string",
        enum=("mxnet", "native", "onnxruntime"),
    )
    precision: str | None = _setting(
        "in place of `ENGINE_PRECISION`", type="string", enum=("fp32", "fp16", "int8")
    )
    max_rows: int | None = _setting(
        "sequences that share a step, in place of `ENGINE_MAX_ROWS`",
        type="integer",
        minimum=1,
        maximum=32,
    )
    queue: int | None = _setting(
        "requests that may wait for it in the gateway", type="integer", minimum=0, maximum=100_000
    )
    timeout_s: float | None = _setting(
        "an answer that takes longer is given up with 504, in place of `REQUEST_TIMEOUT_S`",
        type="number",
        minimum=0.1,
        maximum=MAX_SECONDS,
    )
    idle_unload_s: float | None = _setting(
        "unloaded when no request came for so long", type="number", minimum=1, maximum=31_536_000
    )

    def over(self, other: ModelSettings) -> ModelSettings:
        """Return these settings, with those of `other` in place of None."""
        return replace(other, **self.values())

    def values(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}

    def of_engine(self) -> dict[str, Any]:
        """The settings that are passed to the engine."""
        return {k: v for k, v in self.values().items() if k in ("backend", "precision", "max_rows")}

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> ModelSettings:
        """Check settings of a request or file. Raises `BadRequest` for unknown or invalid ones.

        where: prefix of the setting's name in the message
        """
        known = schema()
        for name in values:
            if name not in known:
                raise BadRequest(
                    f"{where}{name[:100]} is not known; known are {', '.join(sorted(known))}"
                )
        return cls(**{k: checked(where + k, v, known[k]) for k, v in values.items()})

    @classmethod
    def read(cls, folder: Path) -> ModelSettings:
        """Read the settings in a model's `serving.json`, if it has one. Raises `BadRequest`."""
        path = folder / FILE
        if not path.is_file():  # reading a pipe would block
            return cls()
        return cls.parse(read_object(path, MAX_FILE_BYTES), f"{FILE}: ")


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object of at most `max_bytes` from a model's file. Raises `BadRequest`."""
    try:
        with path.open("rb") as file:
            value = read_json(file.read(max_bytes), source=path.name)
    except OSError as error:
        raise BadRequest(f"{path.name} cannot be read: {error}") from None
    except InvalidRequest as error:
        raise BadRequest(error.message) from None
    if not isinstance(value, dict):
        raise BadRequest(f"{path.name} must hold a JSON object")
    return value


def schema() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of each setting, by name."""
    return {f.name: f.metadata["schema"] for f in fields(ModelSettings)}


def checked(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Return the value, converted from a query string's text. Raises `BadRequest` if invalid."""
    kind = schema["type"]
    if isinstance(value, str) and kind != "string":
        value = _from_text(value)
    if "enum" in schema:
        right, allowed = value in schema["enum"], " or ".join(schema["enum"])
    elif kind == "boolean":
        right, allowed = isinstance(value, bool), "true or false"
    elif kind == "string":
        most = schema["maxLength"]
        right = isinstance(value, str) and 0 < len(value) <= most
        allowed = f"text of 1 to {most} characters"
    else:
        low, high = schema["minimum"], schema["maximum"]
        right = isinstance(value, int if kind == "integer" else int | float)
        right = right and not isinstance(value, bool) and low <= value <= high
        allowed = f"{'an integer' if kind == 'integer' else 'a number'} from {low} to {high}"
    if not right:
        raise BadRequest(f"{name} must be {allowed}, is {quoted(value)}")
    return value


def _from_text(text: str) -> Any:
    try:
        return json.loads(text.lower())
    except (ValueError, RecursionError):
        return text
