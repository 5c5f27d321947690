"""Triton's statistics extension, for those statistics that this server counts.

GET /v2/models/stats, /v2/models/{name}[/versions/{version}]/stats

The gateway counts requests; the engine counts steps and the time until a prompt is begun. The time
from then to the answer is `compute_infer`; copies of tensors are not timed separately.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

from __future__ import annotations

import contextlib
from typing import Any

from common.errors import EngineError
from serving.api.gateway import Gateway
from serving.api.metrics import Tally
from serving.models.model import Model

Stat = dict[str, int]


async def statistics(gateway: Gateway, models: list[Model]) -> dict[str, Any]:
    of_engine: dict[str, Any] = {}
    with contextlib.suppress(EngineError):
        counted = (await gateway.engine.statistics(timeout_s=2))["models"]
        of_engine = {entry["name"]: entry for entry in counted}
    tallies = gateway.metrics.tallies
    return {
        "model_stats": [
            _model_stat(model, tallies.get(model.name, Tally()), of_engine.get(model.engine_name))
            for model in models
        ]
    }


def _model_stat(model: Model, tally: Tally, engine: dict[str, Any] | None) -> dict[str, Any]:
    success, fail = _stat(*tally.good), _stat(*tally.bad)
    queue = nothing = _stat(0, 0.0)
    if engine is not None:
        waits = engine["queue_s"]
        queue = _stat(waits["buckets"][-1][1], waits["sum"])
    infer = {"count": success["count"], "ns": max(success["ns"] - queue["ns"], 0)}
    return {
        "name": model.name,
        "version": model.version,
        "inference_count": success["count"],
        "execution_count": success["count"] if engine is None else engine["steps"],
        "inference_stats": {
            "success": success,
            "fail": fail,
            "queue": queue,
            "compute_input": nothing,
            "compute_infer": infer,
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
    }


def _stat(count: int, seconds: float) -> Stat:
    return {"count": count, "ns": round(seconds * 1e9)}
