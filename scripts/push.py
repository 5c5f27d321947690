"""`kogpt2 push`: pushes a local image to ECR."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from command.errors import Problem
from command.options import argument, option
from scripts.aws.account import SHARED, Account, Aws

REPOSITORY = "kogpt2-serving"
LIFECYCLE = """{"rules": [{"rulePriority": 1, "action": {"type": "expire"},
    "description": "images without a tag, after 14 days",
    "selection": {"tagStatus": "untagged", "countType": "sinceImagePushed", "countUnit": "days",
                  "countNumber": 14}}]}"""
CPU, ARM, GPU = "cpu-", "arm64-", "gpu-"  # prefixes of default tags
CAPABILITY = "com.amazonaws.sagemaker.capabilities.multi-models"
SOURCE = "kogpt2-serving.image"  # label of a pushed image, with the id of the local image


@dataclass(kw_only=True)
class Push(Aws):
    image: str = argument("the local image")
    repository: str = option(REPOSITORY, "ECR's repository")
    tag: str | None = option(
        None, "the tag in ECR (default: cpu-, arm64- or gpu- and the start of the image's id)"
    )


def docker(*arguments: str, token: str | None = None, show: bool = False) -> str:
    """Return docker's output. Raises `Problem` with its last line if it fails."""
    done = subprocess.run(
        ["docker", *arguments],
        input=token,
        stdout=None if show else subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines() or ["the reason is above"]
        raise Problem(f"docker {arguments[0]} failed: {lines[-1]}")
    return done.stdout or ""


def inspect(image: str) -> dict[str, Any]:
    """Inspects the local image. Raises `Problem` if SageMaker cannot run it."""
    if shutil.which("docker") is None:
        raise Problem("docker is not installed, or not on PATH")
    try:
        result: dict[str, Any] = json.loads(docker("image", "inspect", image))[0]
    except Problem as problem:
        raise Problem(f"no local image {image}: build it first ({problem})") from None
    if result.get("Architecture") not in ("amd64", "arm64"):
        raise Problem(
            f"{image} is built for {result.get('Architecture')}, SageMaker's instances are amd64"
            " or, Graviton's, arm64: build it with --platform linux/amd64"
        )
    return result


def run(options: Push) -> None:
    """Push a local image to ECR and print its digest.

    Creates a missing repository, which scans images, does not let tags move (so an endpoint keeps
    its image), and deletes images without a tag after 14 days. Pushing the same image again changes
    nothing. In ECR the image's user is root, which SageMaker expects; the server gives that up.

    Examples:
    scripts/build cpu
    kogpt2 push kogpt2-serving:cpu --region us-east-1
    kogpt2 push kogpt2-serving:cpu --tag v1
    """
    image = inspect(options.image)
    account = Account(options)
    configuration = image.get("Config") or {}
    gpu = "ENGINE_DEVICE=gpu" in (configuration.get("Env") or [])
    kind = GPU if gpu else ARM if image["Architecture"] == "arm64" else CPU
    tag = options.tag or kind + image["Id"].removeprefix("sha256:")[:12]
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag):
        raise Problem(f"{tag} cannot be a tag: letters, digits, . _ - only")
    labels = configuration.get("Labels") or {}
    if labels.get(CAPABILITY) != "true":
        print(f"note: {options.image} has no label {CAPABILITY}=true: single-model endpoints only")
    uri = repository(account, options.repository)
    result = in_ecr(account, options.repository, imageTag=tag)
    if result is None:
        send(account, image["Id"], f"{uri}:{tag}")
        result = in_ecr(account, options.repository, imageTag=tag)
        if result is None:
            raise Problem(f"docker pushed {uri}:{tag}, but ECR does not have it")
    elif options.tag and result["imageDigest"] not in pushed(image["Id"], f"{uri}:{tag}"):
        raise Problem(f"{uri}:{tag} is another image, and tags cannot be moved: choose another")
    # BuildKit wraps an image and its provenance into an index.
    if re.search("index|list", result.get("imageManifestMediaType", "")):
        print("note: it is an image index, which SageMaker refuses: build with --provenance=false")
    print(f"{uri}@{result['imageDigest']}")


def repository(account: Account, name: str) -> str:
    """Return the URI of the repository, which is created if it is missing."""
    result = account.find("ecr", "describe_repositories", repositoryNames=[name])
    if result:
        return str(result["repositories"][0]["repositoryUri"])
    ecr = account.client("ecr")
    made = ecr.create_repository(
        repositoryName=name,
        imageTagMutability="IMMUTABLE",
        imageScanningConfiguration={"scanOnPush": True},
        tags=SHARED,
    )
    ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=LIFECYCLE)
    print(f"made ECR's repository {name}")
    return str(made["repository"]["repositoryUri"])


def in_ecr(account: Account, name: str, **identity: str) -> dict[str, Any] | None:
    """Return ECR's image with this `imageTag` or `imageDigest`, or None."""
    result = account.find("ecr", "describe_images", repositoryName=name, imageIds=[identity])
    return result["imageDetails"][0] if result else None


def pushed(image: str, target: str) -> list[str]:
    """Return the ECR digests of the image that `send` made of a local image, [] without any."""
    try:
        made = json.loads(docker("image", "inspect", target))[0]
    except Problem:
        return []
    if (made["Config"].get("Labels") or {}).get(SOURCE) != image:
        return []
    return [name.rpartition("@")[2] for name in made.get("RepoDigests") or []]


def send(account: Account, image: str, target: str) -> None:
    """Log in, make an image with the user root, and push that.

    SageMaker expects root, see "Custom Inference Code with Hosting Services" in its guide: the
    files of models may be closed to other users.
    """
    # The token goes through a pipe, because every process can read command lines.
    token = account.client("ecr").get_authorization_token()["authorizationData"][0]
    secret = base64.b64decode(token["authorizationToken"]).decode().partition(":")[2]
    registry = target.partition("/")[0]
    docker("login", "--username", "AWS", "--password-stdin", registry, token=secret)
    container = docker("create", image).strip()
    try:
        changes = ("--change", "USER 0", "--change", f"LABEL {SOURCE}={image}")
        docker("commit", *changes, container, target)
    finally:
        docker("rm", container)
    docker("push", target, show=True)
