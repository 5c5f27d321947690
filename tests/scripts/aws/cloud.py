"""An AWS account on loopback: moto behind real HTTP, asked by the real scripts.

What moto 5.2.5 lacks of what the scripts need is in `gaps`, as the API reference describes it:

- stacks that are in progress for a while, or fail;
- `AWS::NoValue` in lists, which takes the item away;
- a stack's description and an endpoint's name, and the instance types of the last years;
- one stack for all change sets of a new one;
- what was not given is not described: no VpcConfig, rather than an empty one.

Not there at all: the stack's scaling and budget, and rules (test_template.py looks at those);
images that are really pushed and scanned; containers that run; limits; prices. A change of
parameters alone is not in a change set, and an updated endpoint keeps its configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID

from testbed.s3 import ACCESS
from testbed.s3 import client as client_of
from tests.scripts import command as in_process
from tests.serving.store.s3 import s3_server

WIDE_S = 120.0  # for a script of its own, which takes some seconds
REGION = ACCESS["AWS_REGION"]
BUCKET = "fine-tunes"
MODELS = f"s3://{BUCKET}/kogpt2/"
CHANGES = ("Create", "Update", "Put", "Delete", "Execute", "Tag", "Add")


class Cloud:
    """`busy`: stacks stay in progress until `finish()`; `failure`: why the next one fails."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.busy = False
        self.failure: str | None = None
        self.calls: list[str] = []
        self._clients: dict[tuple[str, str], Any] = {}
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            **ACCESS,
            "AWS_ENDPOINT_URL": url,
            "AWS_ENDPOINT_URL_PRICING": "http://127.0.0.1:9",  # which answers nobody
        }

    def client(self, service: str, region: str = REGION) -> Any:
        key = (service, region)
        if key not in self._clients:
            self._clients[key] = client_of(self.url, service, region)
        return self._clients[key]

    def reset(self) -> None:
        requests.post(f"{self.url}/moto-api/reset", timeout=60)
        self.busy, self.failure = False, None
        self.calls.clear()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def changes(self) -> list[str]:
        """The calls since the last time that changed something."""
        found = [call for call in self.calls if call.startswith(CHANGES)]
        self.calls.clear()
        return found

    def start(
        self, command: str, *args: str, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.start", command, *args],
            env=self.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, *args: str, code: int = 0, **environment: str) -> str:
        """stdout after a run that ends with this code; what it says last where that is not 0."""
        done = in_process.run(command, *args, environment=self.environment | environment)
        assert done.returncode == code, done.stdout + done.stderr
        if code == 0:
            return done.stdout
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(f"{command}: "), done.stderr
        return last.removeprefix(f"{command}: ")

    def put_models(self, **sizes: int) -> None:
        s3 = self.client("s3")
        s3.create_bucket(Bucket=BUCKET)
        for name, size in sizes.items():
            s3.put_object(Bucket=BUCKET, Key=f"kogpt2/{name}.tar.gz", Body=bytes(size))

    def put_image(self, tag: str = "cpu-v1") -> str:
        """Its URI by digest."""
        ecr, repository = self.client("ecr"), "kogpt2-serving"
        with contextlib.suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        # Without layers, moto draws a digest from 101: two images in a hundred are one.
        layers = [{"digest": f"sha256:{hashlib.sha256(tag.encode()).hexdigest()}", "size": 1}]
        made = ecr.put_image(
            repositoryName=repository,
            imageTag=tag,
            imageManifest=json.dumps({"schemaVersion": 2, "layers": layers}),
            imageManifestMediaType="application/vnd.oci.image.manifest.v1+json",
        )["image"]
        account = made["registryId"]
        images = get_backend("ecr")[account][REGION].repositories[repository].images
        images[-1].image_pushed_at += len(images)  # ECR counts in seconds
        host = f"{account}.dkr.ecr.{REGION}.amazonaws.com"
        return f"{host}/{repository}@{made['imageId']['imageDigest']}"

    def stack(self, name: str) -> Any:
        """moto's own, to look at what is not answered."""
        stacks = get_backend("cloudformation")[DEFAULT_ACCOUNT_ID][REGION].stacks.values()
        return next((stack for stack in stacks if stack.name == name), None)

    def finish(self) -> None:
        """Lets what is in progress end now."""
        self.busy = False
        for stack in get_backend("cloudformation")[DEFAULT_ACCOUNT_ID][REGION].stacks.values():
            stack.status = stack.status.replace("_IN_PROGRESS", "_COMPLETE")

    def endpoint(self, name: str) -> dict[str, Any]:
        """Describe the endpoint, with its configuration's variant and its model's container."""
        sagemaker = self.client("sagemaker")
        found: dict[str, Any] = sagemaker.describe_endpoint(EndpointName=name)
        config = sagemaker.describe_endpoint_config(EndpointConfigName=found["EndpointConfigName"])
        variant = config["ProductionVariants"][0]
        model = sagemaker.describe_model(ModelName=variant["ModelName"])
        return found | {"config": config, "variant": variant, "model": model}


@contextlib.contextmanager
def cloud(folder: Path) -> Iterator[Cloud]:
    from tests.scripts.aws.gaps import fill_gaps  # two seconds, which each worker would take

    with s3_server() as s3, pytest.MonkeyPatch.context() as patch:  # moto has all services
        made = Cloud(s3.url, folder)
        fill_gaps(patch, made)
        yield made
        made.close()
