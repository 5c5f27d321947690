"""Reads `model.json`, the options of a worker's model, which the gateway writes to its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SPEC_FILE = "model.json"


@dataclass(frozen=True)
class ModelSpec:
    """A model's options; `path` is its folder, `folder` the worker's, removed with the model."""

    name: str
    engine_name: str
    path: str
    folder: str
    handler: str | None = None  # `module:function`, where the load request named one
    batch_size: int = 1
    gpu_id: int | None = None
    # Options of the load in the engine: `backend`, `precision`, `max_rows`, `base`.
    engine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, context: Any) -> ModelSpec:
        """Read the options for the context that Multi Model Server passes to `initialize`."""
        properties = context.system_properties
        folder = Path(properties["model_dir"])
        sizes = {"batch_size": properties["batch_size"], "gpu_id": properties["gpu_id"]}
        return replace(cls.read(folder, context.model_name), **sizes)

    @classmethod
    def read(cls, folder: Path, name: str) -> ModelSpec:
        """Read `model.json`; without it `folder` is the model's own and `name` its name."""
        try:
            fields = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            fields = {"name": name, "engine_name": name, "path": str(folder)}
        return cls(folder=str(folder), **fields)


def client_name(engine_name: str) -> str:
    """Return the model's name for clients, without the load id that the gateway appends."""
    return re.sub(r"#[0-9a-f]{6}-[0-9]+$", "", engine_name)
