"""A deployment, removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.aws import locations, permissions, resources, status
from scripts.aws.account import Account, Asking
from scripts.aws.report import mebibytes, phase, wait
from scripts.aws.resources import Resource
from scripts.lib.problem import Problem
from scripts.options import argument, option

LIMIT_S = 1800.0


@dataclass(kw_only=True)
class Teardown(Asking):
    name: str = argument("of the deployment")
    keep_logs: bool = option(False, "leave what it logged")
    everything: bool = option(False, "repositories and bucket, too")


def run(options: Teardown) -> None:
    """Removes what `kogpt2 deploy` made, and says what is left.

    It shows the list and what it costs, asks, and deletes in the order that AWS needs. Models in S3
    stay, as do the image repository and captured data: other deployments may use them. --everything
    also removes the repositories that `kogpt2 push` made, and the bucket that `kogpt2 upload` made,
    with all that is in them.

    Examples:
    kogpt2 teardown poems --dry-run
    kogpt2 teardown poems
    kogpt2 teardown poems --keep-logs --yes
    kogpt2 teardown poems --everything
    """
    account = Account(options)
    with phase("search") as step:
        item = status.describe(account, options.name)
        buckets = used_buckets(account, options.name)
        listed = to_delete(account, options, buckets)
        step.result = f"{len(listed)} things of {options.name} in {account.region}"
    for one in listed:
        print(f"  {one.kind:<14} {one.name}")
    if listed:
        print(f"  they cost      {item.get('cost', 'nothing by the hour')}")
        if not account.confirm(f"Delete these {len(listed)}?"):
            raise Problem("nothing deleted")
        for one in listed:
            with phase(one.kind, account.dry_run) as step:
                delete(account, one)
                step.result = f"{one.name} deleted"
    if account.dry_run:
        return
    left = to_delete(account, options, buckets)
    for one in left:
        print(f"  still there: {one.kind} {one.name}")
    for line in kept(account, buckets):
        print(f"  not deleted: {line}")
    if left:
        raise Problem(f"{len(left)} things are left; run this again")
    print(f"nothing of {options.name} is left" if listed else f"there is nothing of {options.name}")


def used_buckets(account: Account, name: str) -> list[locations.Location]:
    """Where the deployment's models are, and where its endpoint writes to."""
    texts = []
    for one in resources.in_sagemaker(account, "model", name):
        found = account.find("sagemaker", "describe_model", ModelName=one.name) or {}
        texts.append(found.get("PrimaryContainer", {}).get("ModelDataUrl"))
    for one in resources.in_sagemaker(account, "configuration", name):
        found = account.find("sagemaker", "describe_endpoint_config", EndpointConfigName=one.name)
        found = found or {}
        texts.append((found.get("DataCaptureConfig") or {}).get("DestinationS3Uri"))
        asynchronous = found.get("AsyncInferenceConfig") or {}
        texts.append(asynchronous.get("OutputConfig", {}).get("S3OutputPath"))
    return [locations.parse(text) for text in dict.fromkeys(filter(None, texts))]


def to_delete(
    account: Account, options: Teardown, buckets: list[locations.Location]
) -> list[Resource]:
    found = resources.of(account, options.name)
    if options.keep_logs:
        found = [one for one in found if one.kind != "log group"]
    if options.everything:
        found += resources.shared_repositories(account)
        found += [
            Resource("bucket", bucket, "")
            for bucket in sorted({location.bucket for location in buckets})
            if locations.region_of(account, bucket) and resources.is_shared_bucket(account, bucket)
        ]
    return found


def kept(account: Account, buckets: list[locations.Location]) -> list[str]:
    """What stays and may cost something."""
    lines = []
    for location in buckets:
        if locations.region_of(account, location.bucket) is None:
            continue
        objects = account.ask_all(
            "s3", "list_objects_v2", "Contents", Bucket=location.bucket, Prefix=location.key
        )
        if objects:
            size = mebibytes(sum(item["Size"] for item in objects))
            lines.append(f"{location}: {len(objects)} objects, {size}")
    for one in resources.shared_repositories(account):
        lines.append(f"ECR repository {one.name}")
    return lines


def delete(account: Account, one: Resource) -> None:
    do = account.do
    if one.kind == "autoscaling":
        do("application-autoscaling", "deregister_scalable_target",
           **resources.scalable(one.deployment))  # fmt: skip
    elif one.kind == "endpoint":
        delete_endpoint(account, one.name)
    elif one.kind == "configuration":
        do("sagemaker", "delete_endpoint_config", EndpointConfigName=one.name)
    elif one.kind == "model":
        do("sagemaker", "delete_model", ModelName=one.name)
    elif one.kind == "log group":
        do("logs", "delete_log_group", logGroupName=one.name)
    elif one.kind == "role":
        do("iam", "delete_role_policy", RoleName=one.name, PolicyName=permissions.POLICY)
        do("iam", "delete_role", RoleName=one.name)
    elif one.kind == "repository":
        do("ecr", "delete_repository", repositoryName=one.name, force=True)
    elif one.kind == "bucket":
        empty(account, one.name)
        do("s3", "delete_bucket", Bucket=one.name)


def delete_endpoint(account: Account, name: str) -> None:
    """AWS deletes no endpoint that is being made or updated, so that is waited for."""

    def state() -> str:
        found = account.find("sagemaker", "describe_endpoint", EndpointName=name)
        return found["EndpointStatus"] if found else "gone"

    what = f"endpoint {name}"
    busy = tuple(set(resources.BUSY) - {"Deleting"})
    if not account.dry_run and wait(what, state, busy, LIMIT_S) in ("Deleting", "gone"):
        wait(what, state, resources.BUSY, LIMIT_S)
        return
    account.do("sagemaker", "delete_endpoint", EndpointName=name)
    if not account.dry_run and wait(what, state, resources.BUSY, LIMIT_S) != "gone":
        raise Problem(f"SageMaker could not delete {what}: {state()}")


def empty(account: Account, bucket: str) -> None:
    """All objects in all their versions."""
    pages: Any = account.client("s3").get_paginator("list_object_versions")
    for page in pages.paginate(Bucket=bucket):
        items = page.get("Versions", []) + page.get("DeleteMarkers", [])
        keys = [{"Key": item["Key"], "VersionId": item["VersionId"]} for item in items]
        if keys:
            account.do("s3", "delete_objects", Bucket=bucket, Delete={"Objects": keys})
