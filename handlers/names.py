"""What a model is called."""

from __future__ import annotations

import re


def client_name(engine_name: str) -> str:
    """The clients' name for the model: the gateway adds an id of each load to it."""
    return re.sub(r"#[0-9a-f]{6}-[0-9]+$", "", engine_name)
