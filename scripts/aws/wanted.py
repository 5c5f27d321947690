"""From options to a deployment: looks at the account, and finds every mistake before a change."""

from __future__ import annotations

import re

from scripts.aws import deployment, instances, locations, permissions
from scripts.aws.account import Account
from scripts.aws.deploy_options import Deploy
from scripts.aws.deployment import Deployment
from scripts.aws.permissions import Role
from scripts.aws.push import REPOSITORY
from scripts.lib.problem import Problem


def examine(options: Deploy, account: Account) -> tuple[Deployment, Role]:
    """What shall be, and the role for it. Raises `Problem` for all that can be known before."""
    for text in filter(None, (options.models, options.data_capture, options.async_output)):
        locations.check_bucket(account, locations.parse(text))
    sizes = artifact_sizes(options, account)
    image = resolve_image(account, options.image)
    role = permissions.find(options, account, permissions.needed(options, account, image))
    instance = (
        None if options.serverless else options.instance_type or pick(options, account, sizes)
    )
    return deployment.build(options, image, role.arn, instance), role


def artifact_sizes(options: Deploy, account: Account) -> list[int]:
    if options.models:
        prefix = locations.parse(options.models)
        found = locations.artifacts(account, prefix)
        if not found:
            raise Problem(f"no *.tar.gz at {prefix}: kogpt2 upload puts models there")
        return [artifact.size_bytes for artifact in found]
    if options.model:
        place = locations.parse(options.model, prefix=False)
        locations.check_bucket(account, place)
        head = account.find("s3", "head_object", Bucket=place.bucket, Key=place.key)
        if head is None:
            raise Problem(f"there is no {place}: kogpt2 upload puts models there")
        return [head["ContentLength"]]
    return []


def pick(options: Deploy, account: Account, sizes: list[int]) -> str:
    wanted = options.models_in_memory or len(sizes)
    if options.memory_per_model:
        one = options.memory_per_model * instances.MIB
    else:
        one = instances.model_bytes(sizes, wanted, dict(options.env))
    many = options.autoscale[1] if options.autoscale else options.instances
    return instances.choose(
        one, wanted, many, options.budget, bool(options.autoscale), account.region
    ).type


def resolve_image(account: Account, image: str | None) -> str:
    """By digest where it is in this account, so that what is checked is what runs."""
    if image is None:
        found = account.find("ecr", "describe_repositories", repositoryNames=[REPOSITORY])
        images = found and account.ask_all(
            "ecr",
            "describe_images",
            "imageDetails",
            repositoryName=REPOSITORY,
            filter={"tagStatus": "TAGGED"},
        )
        if not images:
            raise Problem(f"no image in ECR's repository {REPOSITORY}: kogpt2 push puts one there")
        newest = max(images, key=lambda item: item["imagePushedAt"])
        return f"{found['repositories'][0]['repositoryUri']}@{newest['imageDigest']}"
    match = re.match(r"(\d+)\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com[^/]*/([^:@]+)(.*)$", image)
    if match is None:
        raise Problem(
            f"{image} is not in ECR, where SageMaker takes its images from: kogpt2 push it"
        )
    owner, region, name, version = match.groups()
    if region != account.region:
        raise Problem(
            f"{image} is in {region}, the endpoint would be in {account.region}: push there"
        )
    if owner != account.id:
        return image  # another account's, such as AWS's own containers: not ours to look into
    key = "imageDigest" if version.startswith("@") else "imageTag"
    wanted = {key: version[1:] or "latest"}
    found = account.find("ecr", "describe_images", repositoryName=name, imageIds=[wanted])
    if not found:
        raise Problem(f"ECR has no {image}: kogpt2 push puts it there")
    digest = found["imageDetails"][0]["imageDigest"]
    return f"{image[: len(image) - len(version)]}@{digest}"
