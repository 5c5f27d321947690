"""Instances: what they cost, how many models they hold, and which one to take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.budget import budget_bytes
from scripts.client.tables import table
from scripts.lib.problem import Problem

DATA = Path(__file__).with_name("instances.json")
GIB, MIB = 1 << 30, 1 << 20
KV_BYTES = GIB  # for keys and values of requests in flight: 14 rows of 1,024 tokens
WORKER_BYTES = 20 * MIB  # a model's worker process
# Resident bytes of weights per byte of archive, of float32 archives: docs/benchmark.md has the
# weights (497 MB in fp32, 147 MB in int8), and gzip takes some 8 % off random weights.
FP32, INT8 = 1.1, 0.33


@dataclass(frozen=True)
class Instance:
    type: str
    vcpus: int
    memory_gib: float
    usd_per_hour: float
    gpu_gib: float = 0

    def holds(self, model_bytes: int) -> int:
        """Models of this size in memory: the engine's default budget, less K/V caches."""
        budget = budget_bytes(int(self.memory_gib * GIB))
        return max(0, (budget - KV_BYTES) // model_bytes)


@cache
def data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return loaded


@cache
def all_instances() -> tuple[Instance, ...]:
    return tuple(Instance(**row) for row in data()["instances"])


def known(name: str) -> Instance | None:
    return next((instance for instance in all_instances() if instance.type == name), None)


def as_of(region: str) -> str:
    """The sentence that goes with every price."""
    there = "" if region == data()["region"] else f", not {region}'s"
    return f"{data()['region']} prices of {data()['as_of']}{there}; prices change"


def model_bytes(sizes: Sequence[int], wanted: int, environment: Mapping[str, str]) -> int:
    """Memory for one of the `wanted` largest artifacts, on average, with this engine."""
    engine = environment.get("ENGINE_BACKEND", "mxnet")
    int8 = engine == "onnxruntime" and environment.get("ENGINE_PRECISION", "int8") == "int8"
    largest = sorted(sizes, reverse=True)[:wanted]
    return int(sum(largest) / len(largest) * (INT8 if int8 else FP32)) + WORKER_BYTES


def choose(
    one_bytes: int, wanted: int, instances: int, budget: float | None, autoscaled: bool, region: str
) -> Instance:
    """The cheapest that holds the models within the budget, after showing what it chose from.

    Raises `Problem` where none does.
    """
    rows: list[tuple[str, ...]] = []
    chosen: Instance | None = None
    holding: Instance | None = None
    for instance in sorted(all_instances(), key=lambda i: (i.usd_per_hour, -i.vcpus)):
        if instance.gpu_gib:
            continue
        cost, holds = instance.usd_per_hour * instances, instance.holds(one_bytes)
        why = ""
        if holds < wanted:
            why = "too small"
        elif autoscaled and instance.type.startswith("ml.t"):
            why = "burstable: cannot be auto-scaled"
        else:
            holding = holding or instance
            if budget is not None and cost > budget:
                why = "over the budget"
            elif chosen is None:
                chosen, why = instance, "<- chosen: the cheapest that holds them"
        size = f"{instance.memory_gib:g} GiB"
        rows.append((instance.type, str(instance.vcpus), size, f"{cost:.3f}", str(holds), why))
    each = f"{one_bytes / MIB:,.0f} MiB each"
    many = f"{instances} of them" if instances > 1 else "one"
    print(f"room for {wanted} models of {each}, $/hour for {many} ({as_of(region)}):")
    print(table(["instance", "vCPU", "memory", "$/hour", "models", ""], rows))
    if chosen is None:
        if holding is None:
            raise Problem(f"no instance known here holds {wanted} models at a time: want fewer")
        needs = holding.usd_per_hour * instances
        raise Problem(
            f"nothing under ${budget:g} an hour holds {wanted} models; {holding.type} does for"
            f" ${needs:.3f}: raise --budget or lower --models-in-memory"
        )
    return chosen
