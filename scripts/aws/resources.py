"""What kogpt2 deploy made, found by its tag.

SageMaker's own lists are asked, one call more per thing than the Resource Groups Tagging API, since
that one lags behind: it misses what was just made and shows what was just deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.aws import permissions
from scripts.aws.account import TAG, Account, log_group

VARIANT = "AllTraffic"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
BUSY = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")
# kind -> operation, key of the list, prefix of its fields
LISTS = {
    "endpoint": ("list_endpoints", "Endpoints", "Endpoint"),
    "configuration": ("list_endpoint_configs", "EndpointConfigs", "EndpointConfig"),
    "model": ("list_models", "Models", "Model"),
}


@dataclass(frozen=True)
class Resource:
    kind: str
    name: str
    deployment: str


def in_sagemaker(account: Account, kind: str, deployment: str | None = None) -> list[Resource]:
    """The tagged endpoints, configurations or models, of one deployment or of all."""
    operation, key, field = LISTS[kind]
    contains = {"NameContains": deployment} if deployment else {}
    found = []
    for item in account.ask_all("sagemaker", operation, key, **contains):
        tags = account.find("sagemaker", "list_tags", ResourceArn=item[f"{field}Arn"])
        owner = {tag["Key"]: tag["Value"] for tag in (tags or {}).get("Tags", [])}.get(TAG)
        if owner and deployment in (None, owner):
            found.append(Resource(kind, item[f"{field}Name"], owner))
    return found


def log_group_owner(account: Account, deployment: str) -> str | None:
    """Its tag, empty where it has none; None where there is no log group."""
    name = log_group(deployment)
    for group in account.ask("logs", "describe_log_groups", logGroupNamePrefix=name)["logGroups"]:
        if group["logGroupName"] == name:
            arn = group["arn"].removesuffix(":*")
            tags = account.ask("logs", "list_tags_for_resource", resourceArn=arn)["tags"]
            return str(tags.get(TAG, ""))
    return None


def scalable(deployment: str) -> dict[str, str]:
    """How Application Auto Scaling names the endpoint's variant."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{deployment}/variant/{VARIANT}",
        "ScalableDimension": DIMENSION,
    }


def scaling_target(account: Account, deployment: str) -> dict[str, Any] | None:
    ids = scalable(deployment)
    found = account.ask(
        "application-autoscaling",
        "describe_scalable_targets",
        ServiceNamespace=ids["ServiceNamespace"],
        ResourceIds=[ids["ResourceId"]],
    )["ScalableTargets"]
    return found[0] if found else None


def of(account: Account, deployment: str) -> list[Resource]:
    """All of one deployment, in the order in which it can be deleted."""
    found = []
    for kind in LISTS:
        found += in_sagemaker(account, kind, deployment)
    ours = Resource("endpoint", deployment, deployment) in found
    # A target bears the name of its endpoint, which may be somebody else's.
    free = account.find("sagemaker", "describe_endpoint", EndpointName=deployment) is None
    if (ours or free) and scaling_target(account, deployment):
        found.insert(0, Resource("autoscaling", scalable(deployment)["ResourceId"], deployment))
    if log_group_owner(account, deployment) == deployment:
        found.append(Resource("log group", log_group(deployment), deployment))
    role_name = permissions.name_for(deployment, account.region)
    role = account.find("iam", "get_role", RoleName=role_name)
    if role and permissions.is_ours(role["Role"], deployment):
        found.append(Resource("role", role_name, deployment))
    return found


def shared_repositories(account: Account) -> list[Resource]:
    """The repositories that kogpt2 push made."""
    found = []
    for item in account.ask_all("ecr", "describe_repositories", "repositories"):
        tags = account.ask("ecr", "list_tags_for_resource", resourceArn=item["repositoryArn"])
        if any(tag["Key"] == TAG for tag in tags["tags"]):
            found.append(Resource("repository", item["repositoryName"], ""))
    return found


def is_shared_bucket(account: Account, bucket: str) -> bool:
    """Whether kogpt2 upload made it."""
    found = account.find("s3", "get_bucket_tagging", Bucket=bucket)
    return bool(found) and any(tag["Key"] == TAG for tag in found["TagSet"])
