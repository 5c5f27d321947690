"""Request parameters of the Open Inference Protocol that are for all models.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_schedule_policy.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HINTS = ("timeout", "priority", "content_type")


def timeout_s(parameters: Any) -> float | None:
    """Return `timeout`, sent in microseconds, in seconds; None if it is absent or invalid."""
    value = parameters.get("timeout") if isinstance(parameters, Mapping) else None
    return value / 1e6 if type(value) is int and value > 0 else None
