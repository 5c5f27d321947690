"""`kogpt2 status`: shows deployments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from command.errors import Problem
from command.options import argument, option
from scripts.aws import instances, locations
from scripts.aws.account import Account, Aws
from scripts.aws.template import with_defaults
from scripts.deploy import is_ours


@dataclass(kw_only=True)
class Status(Aws):
    name: str | None = argument("the deployment (default: all in the region)", None)
    json: bool = option(False, "print JSON")


def run(options: Status) -> None:
    """Show the stacks of the template: endpoints, their instances, models and hourly cost.

    Examples:
    kogpt2 status
    kogpt2 status poems --region us-east-1
    kogpt2 status --json
    """
    account = Account(options)
    stacks = account.all("cloudformation", "describe_stacks", "Stacks")
    wanted = [s for s in stacks if is_ours(s) and options.name in (None, s["StackName"])]
    if options.name and not wanted:
        raise Problem(f"there is no deployment {options.name} in {account.region}")
    prices = instances.prices(account)
    result = [describe(account, stack, prices) for stack in wanted]
    if options.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
        return
    for item in result:
        print("\n".join(f"{'' if key == 'name' else f'  {key:<10} '}{item[key]}" for key in item))
    total = sum(item["usd_per_hour"] or 0 for item in result)
    print(f"{len(result)} deployments in {account.region}, ${total:.3f} an hour ({prices.source})")


def describe(account: Account, stack: dict[str, Any], prices: instances.Prices) -> dict[str, Any]:
    """Return a deployment's state, cost and models; `usd_per_hour` is None if it is unknown."""
    given = {item["ParameterKey"]: item["ParameterValue"] for item in stack.get("Parameters", [])}
    values = with_defaults(given)
    item: dict[str, Any] = {"name": stack["StackName"], "stack": stack["StackStatus"]}
    result = account.find("sagemaker", "describe_endpoint", EndpointName=stack["StackName"])
    if result is None:
        return {**item, "endpoint": "none", "usd_per_hour": 0.0}
    live = (result.get("ProductionVariants") or [{}])[0]
    count = live.get("CurrentInstanceCount")
    usd = prices.usd.get(values["InstanceType"])
    item["endpoint"] = " ".join([result["EndpointStatus"], result.get("FailureReason", "")]).strip()
    item["usd_per_hour"] = usd and count and usd * count
    if values["ServerlessMemory"] != "0":
        item["usd_per_hour"] = 0.0
    elif live.get("DesiredInstanceCount") != count:
        item["going to"] = f"{live.get('DesiredInstanceCount')} instances"
    item |= {"costs": prices.cost(values, count), "image": values["Image"]}
    if place := values["Models"] or values["Model"]:
        where = locations.parse(place)
        there = locations.region_of(account, where.bucket) is not None
        sizes = [one.size_bytes for one in locations.artifacts(account, where)] if there else []
        item["models"] = f"{len(sizes)} at {place}, {locations.mebibytes(sum(sizes))}"
    return item
