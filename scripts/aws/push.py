"""A local image, pushed to ECR."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from scripts.aws.account import SHARED, TAG, Account, Changing, key_values
from scripts.aws.report import phase
from scripts.lib.problem import Problem
from scripts.options import argument, option

REPOSITORY = "kogpt2-serving"
LIFECYCLE = {
    "rules": [
        {
            "rulePriority": 1,
            "description": "images without a tag, after 14 days",
            "selection": {
                "tagStatus": "untagged",
                "countType": "sinceImagePushed",
                "countUnit": "days",
                "countNumber": 14,
            },
            "action": {"type": "expire"},
        }
    ]
}
CAPABILITY = "com.amazonaws.sagemaker.capabilities.multi-models"


@dataclass(kw_only=True)
class Push(Changing):
    image: str = argument("the local image")
    repository: str = option(REPOSITORY, "in ECR")
    tag: str | None = option(None, "there (the start of the image's id)")


def docker(*arguments: str, token: str | None = None, show: bool = False) -> str:
    """What docker prints. Raises `Problem` with its last line where it fails."""
    done = subprocess.run(
        ["docker", *arguments],
        input=token,
        stdout=None if show else subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines() or ["it said why above"]
        raise Problem(f"docker {arguments[0]} failed: {lines[-1]}")
    return done.stdout or ""


def inspect(image: str) -> dict[str, Any]:
    """The local image. Raises `Problem` where SageMaker could not run it."""
    if shutil.which("docker") is None:
        raise Problem("docker is not installed, or not on PATH")
    try:
        found: dict[str, Any] = json.loads(docker("image", "inspect", image))[0]
    except Problem as problem:
        raise Problem(f"no local image {image}: build it first ({problem})") from None
    if found.get("Architecture") != "amd64":
        raise Problem(
            f"{image} is built for {found.get('Architecture')}, SageMaker's instances are amd64:"
            " build it with --platform linux/amd64"
        )
    return found


def run(options: Push) -> None:
    """Pushes a local image to ECR and prints its digest.

    Makes the repository where it is missing: images are scanned when they arrive, tags cannot be
    moved (an endpoint goes on with the image it was made with), and images without a tag go after
    14 days. The same image pushed again changes nothing.

    Examples:
    docker build -f Dockerfile.cpu -t kogpt2-serving:cpu .
    kogpt2 push kogpt2-serving:cpu --region us-east-1
    kogpt2 push kogpt2-serving:cpu --tag v1 --dry-run
    """
    image = inspect(options.image)
    account = Account(options)
    tag = options.tag or image["Id"].removeprefix("sha256:")[:12]
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag):
        raise Problem(f"{tag} cannot be a tag: letters, digits, . _ - only")
    labels = (image.get("Config") or {}).get("Labels") or {}
    if labels.get(CAPABILITY) != "true":
        print(f"note: {options.image} has no label {CAPABILITY}=true: single-model endpoints only")
    uri = repository(account, options.repository)
    with phase("image") as step:
        digest = digest_of(account, options.repository, tag)
        if digest is not None:
            known = [name.rpartition("@")[2] for name in image.get("RepoDigests") or []]
            if options.tag and digest not in known:
                raise Problem(
                    f"{uri}:{tag} is another image already, and tags stay: choose another"
                )
            step.result = f"tag {tag} is there already"
        else:
            step.result = f"tag {tag} is not there yet"
    if digest is None:
        digest = send(account, options.image, uri, tag, options.repository)
    if not account.dry_run:
        warn_of_index(account, options.repository, digest)
    print(f"{uri}@{digest}")


def repository(account: Account, name: str) -> str:
    """The URI of the repository, made where it was missing."""
    with phase("repository", account.dry_run) as step:
        found = account.find("ecr", "describe_repositories", repositoryNames=[name])
        if found is None:
            made = account.do(
                "ecr",
                "create_repository",
                repositoryName=name,
                imageTagMutability="IMMUTABLE",
                imageScanningConfiguration={"scanOnPush": True},
                tags=key_values({TAG: SHARED}),
            )
            step.result = f"{name} made"
            ending = ".cn" if account.region.startswith("cn-") else ""
            default = f"{account.id}.dkr.ecr.{account.region}.amazonaws.com{ending}/{name}"
            uri: str = made.get("repository", {}).get("repositoryUri", default)
        else:
            step.result = f"{name} is there"
            uri = found["repositories"][0]["repositoryUri"]
            tags = account.ask(
                "ecr",
                "list_tags_for_resource",
                resourceArn=found["repositories"][0]["repositoryArn"],
            )["tags"]
            if {"Key": TAG, "Value": SHARED} not in tags:
                return uri  # somebody else's: its rules are theirs
        if account.find("ecr", "get_lifecycle_policy", repositoryName=name) is None:
            text = json.dumps(LIFECYCLE)
            account.do("ecr", "put_lifecycle_policy", repositoryName=name, lifecyclePolicyText=text)
        return uri


def digest_of(account: Account, name: str, tag: str) -> str | None:
    images = account.find(
        "ecr", "describe_images", repositoryName=name, imageIds=[{"imageTag": tag}]
    )
    return images["imageDetails"][0]["imageDigest"] if images else None


def send(account: Account, image: str, uri: str, tag: str, name: str) -> str:
    """Logs in, tags and pushes; the digest that ECR then has."""
    target, registry = f"{uri}:{tag}", uri.partition("/")[0]
    login = ("login", "--username", "AWS", "--password-stdin", registry)
    commands = (login, ("tag", image, target), ("push", target))
    if account.dry_run:
        print("  aws ecr get-authorization-token | (token on stdin of the next)")
        print("\n".join(f"  docker {' '.join(command)}" for command in commands))
        return "sha256:(known after the push)"
    with phase("login") as step:
        # The token goes through a pipe: a command line is there for every process to read.
        token = account.ask("ecr", "get_authorization_token")["authorizationData"][0]
        secret = base64.b64decode(token["authorizationToken"]).decode().partition(":")[2]
        docker(*login, token=secret)
        step.result = registry
    with phase("push") as step:
        docker(*commands[1])
        docker(*commands[2], show=True)
        step.result = target
    digest = digest_of(account, name, tag)
    if digest is None:
        raise Problem(f"docker pushed {target}, but ECR does not have it")
    return digest


def warn_of_index(account: Account, name: str, digest: str) -> None:
    """BuildKit wraps an image and its provenance into an index, which SageMaker does not take."""
    images = account.find(
        "ecr", "describe_images", repositoryName=name, imageIds=[{"imageDigest": digest}]
    )
    kind = images["imageDetails"][0].get("imageManifestMediaType", "") if images else ""
    if "index" in kind or "list" in kind:
        print("note: it is an image index, which SageMaker refuses: build with --provenance=false")
