"""kogpt2 push, with the real ECR calls and a fake docker that records its commands.

No image can be pushed to moto: the fake docker tells moto's ECR of it instead.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.aws.cloud import REGION, Cloud

REGISTRY = f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
ID = "sha256:0123456789abcdef"
AS_ROOT = ("--change", "USER 0", "--change", f"LABEL kogpt2-serving.image={ID}")
LABEL = "com.amazonaws.sagemaker.capabilities.multi-models"
DOCKER = """#!{python} -S
import json, os, sys

arguments = sys.argv[1:]
state = json.load(open(os.environ["DOCKER_STATE"]))
typed = sys.stdin.read() if arguments[0] == "login" else ""
with open(os.environ["DOCKER_LOG"], "a") as log:
    log.write(json.dumps([arguments, typed]) + "\\n")
if arguments[0] == state.get("fails"):
    sys.exit("denied: 권한이 없습니다")
made_path = os.environ["DOCKER_STATE"] + ".made"
made = json.load(open(made_path)) if os.path.exists(made_path) else {{}}
if arguments[:2] == ["image", "inspect"]:
    images = {{"kogpt2-serving:cpu": state["image"], **made}}
    if arguments[2] not in images:
        sys.exit("Error: No such image: " + arguments[2])
    print(json.dumps([images[arguments[2]]]))
if arguments[0] == "create":
    print("c0ffee")
if arguments[0] == "commit":
    key, _, value = arguments[4].removeprefix("LABEL ").partition("=")
    made[arguments[-1]] = {{"Config": {{"Labels": {{key: value}}}}}}
if arguments[0] == "push":
    from urllib.request import Request, urlopen  # boto3 takes a second to start

    name, _, tag = arguments[1].partition("/")[2].partition(":")
    manifest = json.dumps({{"schemaVersion": 2, "config": state["image"]["Id"]}})
    kind = "application/vnd.oci.image." + state["kind"] + ".v1+json"
    fields = ("repositoryName", "imageTag", "imageManifest", "imageManifestMediaType")
    body = json.dumps(dict(zip(fields, (name, tag, manifest, kind)))).encode()
    scope = "AWS4-HMAC-SHA256 Credential=a/20200101/{region}/ecr/aws4_request"
    target = "AmazonEC2ContainerRegistry_V20150921.PutImage"
    headers = {{"X-Amz-Target": target, "Authorization": scope}}
    headers["Content-Type"] = "application/x-amz-json-1.1"
    with urlopen(Request(os.environ["AWS_ENDPOINT_URL"], body, headers)) as answer:
        image = json.load(answer)["image"]
    made[arguments[1]]["RepoDigests"] = [name + "@" + image["imageId"]["imageDigest"]]
json.dump(made, open(made_path, "w"))
"""


class Docker:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.state = folder / "state.json"
        self.environment = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "DOCKER_LOG": str(self.log),
            "DOCKER_STATE": str(self.state),
        }
        path = folder / "docker"
        path.write_text(DOCKER.format(python=sys.executable, region=REGION), encoding="utf-8")
        path.chmod(0o755)
        self.has()

    def has(
        self, image: dict[str, Any] | None = None, fails: str | None = None, kind: str = "manifest"
    ) -> None:
        known = {"Id": ID, "Architecture": "amd64", "Config": {"Labels": {LABEL: "true"}}}
        state = {"image": known | (image or {}), "fails": fails, "kind": kind}
        self.state.write_text(json.dumps(state))

    def calls(self) -> list[tuple[str, ...]]:
        lines = self.log.read_text().splitlines()
        self.log.unlink()
        return [tuple(json.loads(line)[0]) for line in lines]


@pytest.fixture
def docker(tmp_path: Path) -> Docker:
    return Docker(tmp_path)


def push(aws: Cloud, docker: Docker, *options: str, code: int = 0) -> str:
    return aws.run("push", "kogpt2-serving:cpu", *options, code=code, **docker.environment)


def test_first_push_makes_the_repository_and_prints_the_digest(aws: Cloud, docker: Docker) -> None:
    out = push(aws, docker)
    target = f"{REGISTRY}/kogpt2-serving:cpu-0123456789ab"
    ecr = aws.client("ecr")
    token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    typed = [json.loads(line)[1] for line in docker.log.read_text().splitlines()]
    assert docker.calls() == [
        ("image", "inspect", "kogpt2-serving:cpu"),
        ("login", "--username", "AWS", "--password-stdin", REGISTRY),
        ("create", ID),
        ("commit", *AS_ROOT, "c0ffee", target),
        ("rm", "c0ffee"),
        ("push", target),
    ]
    assert typed[1] == base64.b64decode(token).decode().partition(":")[2]
    (repository,) = ecr.describe_repositories()["repositories"]
    assert repository["imageScanningConfiguration"] == {"scanOnPush": True}
    assert repository["imageTagMutability"] == "IMMUTABLE"
    (image,) = ecr.describe_images(repositoryName="kogpt2-serving")["imageDetails"]
    assert out.splitlines()[-1] == f"{REGISTRY}/kogpt2-serving@{image['imageDigest']}"
    policy = ecr.get_lifecycle_policy(repositoryName="kogpt2-serving")["lifecyclePolicyText"]
    assert json.loads(policy)["rules"][0]["selection"]["tagStatus"] == "untagged"
    tags = ecr.list_tags_for_resource(resourceArn=repository["repositoryArn"])["tags"]
    assert tags == [{"Key": "kogpt2-serving", "Value": "shared"}]


def test_second_push_changes_nothing(aws: Cloud, docker: Docker) -> None:
    digest = push(aws, docker).splitlines()[-1]
    aws.changes(), docker.calls()
    assert push(aws, docker).splitlines()[-1] == digest
    assert aws.changes() == []
    assert docker.calls() == [("image", "inspect", "kogpt2-serving:cpu")]


def test_a_tag_says_what_an_image_computes_on(aws: Cloud, docker: Docker) -> None:
    on_gpu = {"Labels": {LABEL: "true"}, "Env": ["PATH=/bin", "ENGINE_DEVICE=gpu"]}
    for image, kind in (({"Config": on_gpu}, "gpu"), ({"Architecture": "arm64"}, "arm64")):
        docker.has(image)
        push(aws, docker)
        assert ("push", f"{REGISTRY}/kogpt2-serving:{kind}-0123456789ab") in docker.calls()


def test_a_push_that_docker_refused_is_done_the_next_time(aws: Cloud, docker: Docker) -> None:
    docker.has(fails="push")
    assert push(aws, docker, code=2) == "docker push failed: the reason is above"
    docker.has(fails="login")
    assert push(aws, docker, code=2) == "docker login failed: denied: 권한이 없습니다"
    docker.has()
    aws.changes()
    assert re.search("@sha256:[0-9a-f]{64}$", push(aws, docker).strip())
    assert "CreateRepository" not in aws.changes()


def test_a_tag_is_never_moved(aws: Cloud, docker: Docker) -> None:
    digest = push(aws, docker, "--tag", "v1").splitlines()[-1]
    assert push(aws, docker, "--tag", "v1").splitlines()[-1] == digest
    docker.has({"Id": "sha256:ffffffffffffffff"})
    said = push(aws, docker, "--tag", "v1", code=2)
    assert said.endswith(":v1 is another image, and tags cannot be moved: choose another")


def test_images_that_sagemaker_could_not_run(aws: Cloud, docker: Docker) -> None:
    docker.has({"Architecture": "386"})
    assert "build it with --platform linux/amd64" in push(aws, docker, code=2)
    docker.has({"Config": {"Labels": None}})
    assert "single-model endpoints only" in push(aws, docker)
    docker.has({"Id": "sha256:ffffffffffffffff"}, kind="index")
    assert "build with --provenance=false" in push(aws, docker)
    said = aws.run("push", "시집:1", code=2, **docker.environment)
    assert said.startswith("no local image 시집:1: build it first")
    assert "docker is not installed" in aws.run("push", "x", code=2, PATH="/nowhere")
