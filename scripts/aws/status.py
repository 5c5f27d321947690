"""What deployments there are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from scripts.aws import deployment, instances, locations, resources
from scripts.aws.account import Account, Aws
from scripts.aws.report import mebibytes
from scripts.lib.problem import Problem
from scripts.options import argument, option


@dataclass(kw_only=True)
class Status(Aws):
    name: str | None = argument("of a deployment (all in the region)", None)
    json: bool = option(False, "for programs")


def run(options: Status) -> None:
    """Shows what `kogpt2 deploy` made: endpoints, their instances, models and hourly cost.

    Examples:
    kogpt2 status
    kogpt2 status poems --region us-east-1
    kogpt2 status --json
    """
    account = Account(options)
    names = [options.name] if options.name else deployments(account)
    found = [describe(account, name) for name in names]
    if options.name and not found[0]["resources"]:
        raise Problem(f"nothing of {options.name} in {account.region}")
    if options.json:
        print(json.dumps(found, indent=1, ensure_ascii=False, default=str))
        return
    for item in found:
        print(as_text(item))
    total = sum(item["usd_per_hour"] or 0 for item in found)
    print(f"{len(found)} deployments in {account.region}, ${total:.3f} an hour in all"
          f" ({instances.as_of(account.region)})")  # fmt: skip


def deployments(account: Account) -> list[str]:
    """Names, from whatever is left of each."""
    kinds = resources.LISTS
    found = (one.deployment for kind in kinds for one in resources.in_sagemaker(account, kind))
    return sorted(set(found))


def describe(account: Account, name: str) -> dict[str, Any]:
    """All that is known of a deployment; `usd_per_hour` is None where a price is not known."""
    item: dict[str, Any] = {
        "name": name,
        "status": "no endpoint",
        "usd_per_hour": 0.0,
        "resources": [f"{one.kind} {one.name}" for one in resources.of(account, name)],
    }
    endpoint = account.find("sagemaker", "describe_endpoint", EndpointName=name)
    if endpoint is None or f"endpoint {name}" not in item["resources"]:
        return item
    config = account.ask(
        "sagemaker",
        "describe_endpoint_config",
        EndpointConfigName=endpoint["EndpointConfigName"],
    )
    variant = config["ProductionVariants"][0]
    live = (endpoint.get("ProductionVariants") or [{}])[0]
    count = live.get("CurrentInstanceCount")
    item.update(
        status=endpoint["EndpointStatus"],
        reason=endpoint.get("FailureReason"),
        size=variant.get("ServerlessConfig") or variant["InstanceType"],
        instances=count,
        instances_wanted=live.get("DesiredInstanceCount"),
        usd_per_hour=deployment.hourly(variant, count),
        cost=deployment.cost(variant, account.region, count),
    )
    if target := resources.scaling_target(account, name):
        item["autoscaling"] = [target["MinCapacity"], target["MaxCapacity"]]
    model = account.find("sagemaker", "describe_model", ModelName=variant["ModelName"])
    if model:
        container = model["PrimaryContainer"]
        item.update(image=container["Image"], source=container.get("ModelDataUrl"))
        if container.get("Mode") == "MultiModel":
            prefix = locations.parse(container["ModelDataUrl"])
            if locations.region_of(account, prefix.bucket):
                models = locations.artifacts(account, prefix)
                item["models"] = {one.name: one.size_bytes for one in models}
    return item


def as_text(item: dict[str, Any]) -> str:
    lines = [f"{item['name']}: {item['status']}"]
    if item.get("reason"):
        lines.append(f"reason     {item['reason']}")
    if "size" in item:
        many = f"{item['instances']} x " if item["instances"] else ""
        wanted = item["instances_wanted"]
        to = f", going to {wanted}" if wanted != item["instances"] else ""
        lines.append(f"runs on    {many}{item['size']}{to}")
        lines.append(f"costs      {item['cost']}")
    if "autoscaling" in item:
        lines.append("scales     from {} to {} instances".format(*item["autoscaling"]))
    if "image" in item:
        lines.append(f"image      {item['image']}")
        lines.append(f"models     {item['source'] or 'the image brings its own'}")
    if "models" in item:
        sizes = item["models"].values()
        lines.append(f"           {len(sizes)} of them, {mebibytes(sum(sizes))}")
    lines += [f"made       {one}" for one in item["resources"]]
    return "\n  ".join(lines)
