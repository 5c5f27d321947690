"""Instance types: their prices, how many models they hold, and the cheapest that fits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command.errors import Problem
from command.tables import table
from engine.budget import RESERVE_MIB, budget_bytes
from scripts.aws.account import Account
from scripts.aws.memory import Needs

if TYPE_CHECKING:
    from engine.settings import Settings

DATA = Path(__file__).with_name("instances.json")
GIB, MIB = 1 << 30, 1 << 20
# Memory of a model outside the engine: in a worker, and for a tokenizer that no other model shares
# (docs/operate/sizing.md).
PROCESS_BYTES = 20 * MIB


@dataclass(frozen=True)
class Instance:
    type: str
    vcpus: int
    memory_gib: float

    def holds(self, model: Needs, settings: Settings) -> int:
        """Return how many such models fit beside the K/V of ENGINE_MAX_ROWS requests."""
        memory = int(self.memory_gib * GIB)
        keys = settings.max_rows * model.row
        in_engine = (settings.memory_mib * MIB or budget_bytes(memory)) - keys
        in_all = memory - RESERVE_MIB * MIB - keys
        weights = max(model.weights, 1)
        return max(0, min(in_engine // weights, in_all // (weights + PROCESS_BYTES)))


@cache
def data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return loaded


@dataclass(frozen=True)
class Prices:
    """USD an hour by instance type; `source` says where and when they are from."""

    usd: Mapping[str, float]
    source: str

    def cost(self, values: Mapping[str, str], count: int | None = None) -> str:
        """Return the cost of an endpoint with these parameters as a sentence."""
        if values["ServerlessMemory"] != "0":
            gib = int(values["ServerlessMemory"]) / 1024
            second = gib * data()["serverless_usd_per_gib_second"]
            return f"nothing while idle, ${second:.5f} for each second of a call ({file_source()})"
        kind, most = values["InstanceType"], int(values["MaxInstances"])
        many = int(values["Instances"]) if count is None else count
        if kind not in self.usd:
            return f"{many} x {kind}: price unknown, see {data()['source']}"
        up_to = f", up to ${self.usd[kind] * most:.3f} when scaled to {most}" if most else ""
        return f"${self.usd[kind] * many:.3f} an hour for {many} x {kind}{up_to} ({self.source})"


def has_gpu(type: str) -> bool:
    """Whether instances of this type have an NVIDIA GPU."""
    return bool(re.match(r"ml\.(p\d|g\d|gr\d)", type))


def is_arm(type: str) -> bool:
    """Whether instances of this type have a Graviton processor, which runs arm64 images only."""
    return bool(re.match(r"ml\.[cmrtx]\d+g", type))


def file_source() -> str:
    return f"{data()['region']} prices of {data()['as_of']}; prices change and differ by region"


def prices(account: Account) -> Prices:
    """Return the Pricing API's prices, or those of instances.json if it fails.

    https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_pricing_GetProducts.html
    """
    from botocore.exceptions import BotoCoreError, ClientError

    wanted = {"regionCode": account.region, "platoinstancetype": "Hosting"}
    filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()]
    usd: dict[str, float] = {}
    try:
        paginator = account.pricing().get_paginator("get_products")
        for page in paginator.paginate(ServiceCode="AmazonSageMaker", Filters=filters):
            for product in map(json.loads, page["PriceList"]):
                for term in product["terms"].get("OnDemand", {}).values():
                    for price in term["priceDimensions"].values():
                        name = product["product"]["attributes"].get("instanceName", "")
                        usd[name] = float(price["pricePerUnit"].get("USD", 0))
    except (BotoCoreError, ClientError):  # no permission, or a partition without it
        usd = {}
    if usd:
        return Prices(usd, f"{account.region}, the Pricing API")
    return Prices({row["type"]: row["usd_per_hour"] for row in data()["instances"]}, file_source())


def typical(models: Sequence[Needs], wanted: int) -> Needs:
    """Return the mean weights of the `wanted` largest models, and their largest row."""
    largest = sorted(models, key=lambda model: model.weights, reverse=True)[:wanted]
    weights = sum(model.weights for model in largest) // len(largest)
    return Needs(weights, max(model.row for model in largest))


def choose(
    model: Needs,
    settings: Settings,
    wanted: int,
    values: Mapping[str, str],
    budget: float | None,
    arm: bool,
    now: Prices,
) -> str:
    """Print the candidates; return the cheapest that holds the models within the budget.

    With `arm` all are Graviton's, without it none is. Raises `Problem` if there is none.
    """
    autoscaled = values["MaxInstances"] != "0"
    instances = int(values["MaxInstances" if autoscaled else "Instances"])
    rows: list[tuple[str, ...]] = []
    chosen: Instance | None = None
    holding: Instance | None = None
    known = (
        Instance(row["type"], row["vcpus"], row["memory_gib"])
        for row in data()["instances"]
        if row["type"] in now.usd
    )
    for instance in sorted(known, key=lambda i: (now.usd[i.type], -i.vcpus)):
        if has_gpu(instance.type) or is_arm(instance.type) != arm:
            continue
        cost, holds = now.usd[instance.type] * instances, instance.holds(model, settings)
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
    each = f"{model.weights / MIB:,.0f} MiB each"
    many = f"{instances} of them" if instances > 1 else "one"
    print(f"room for {wanted} models of {each}, $/hour for {many} ({now.source}):")
    print(table(["instance", "vCPU", "memory", "$/hour", "models", ""], rows))
    if chosen is None:
        if holding is None:
            raise Problem(
                f"no known instance holds {wanted} models at a time: lower --models-in-memory"
            )
        needs = now.usd[holding.type] * instances
        raise Problem(
            f"nothing under ${budget:g} an hour holds {wanted} models; {holding.type} does for"
            f" ${needs:.3f}: raise --budget or lower --models-in-memory"
        )
    return chosen.type
