"""An AWS account on loopback: moto behind real HTTP, asked by the real scripts.

What moto 5.2.5 lacks of what the scripts need is filled in here, as the API reference describes it:

- `UpdateEndpoint`;
- endpoints that are Creating, Updating or Deleting for a while, and refuse changes meanwhile;
- `SimulatePrincipalPolicy`, with moto's own evaluator of policies;
- the instance types of the last years.

Not there at all: images that are really pushed and scanned, containers that run, limits, prices.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.loaders
import pytest
import requests
from moto.core.exceptions import JsonRESTError
from moto.core.responses import ActionResult, BaseResponse
from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.iam.responses import IamResponse
from moto.sagemaker.models import FakeEndpoint, FakeEndpointConfig, SageMakerModelBackend
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer

from tests.scripts import command as in_process

ROOT = Path(__file__).resolve().parents[3]
WIDE_S = 120.0  # for a script of its own, which takes some seconds
REGION = "us-east-1"
BUCKET = "fine-tunes"
MODELS = f"s3://{BUCKET}/kogpt2/"
CHANGES = ("Create", "Update", "Put", "Delete", "Register", "Deregister", "Tag", "Add")
TRUST = {
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ]
}


class Cloud:
    """`settle_s`: how long an endpoint takes to be made, updated or deleted."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.settle_s = 0.0
        self.failure: str | None = None  # why endpoints that settle from now on fail
        self.calls: list[str] = []
        self.refused: set[str] = set()  # actions that answer that a limit is reached
        self._clients: dict[tuple[str, str], Any] = {}
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str, region: str = REGION) -> Any:
        key = (service, region)
        if key not in self._clients:
            self._clients[key] = boto3.client(
                service,
                endpoint_url=self.url,
                region_name=region,
                aws_access_key_id="test",
                aws_secret_access_key="test",  # noqa: S106
            )
        return self._clients[key]

    def reset(self) -> None:
        requests.post(f"{self.url}/moto-api/reset", timeout=10)
        self.settle_s, self.failure = 0.0, None
        self.refused.clear()
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
            [sys.executable, "-m", "scripts.cli", command, *args],
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

    def put_image(self, tag: str = "v1", repository: str = "kogpt2-serving") -> str:
        """Its URI by digest."""
        ecr = self.client("ecr")
        with contextlib.suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        made = ecr.put_image(
            repositoryName=repository,
            imageTag=tag,
            imageManifest=json.dumps({"schemaVersion": 2, "tag": tag}),
            imageManifestMediaType="application/vnd.oci.image.manifest.v1+json",
        )["image"]
        account = made["registryId"]
        host = f"{account}.dkr.ecr.{REGION}.amazonaws.com"
        return f"{host}/{repository}@{made['imageId']['imageDigest']}"

    def put_role(self, name: str, *statements: dict[str, Any]) -> None:
        iam = self.client("iam")
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))
        document = json.dumps({"Version": "2012-10-17", "Statement": list(statements)})
        iam.put_role_policy(RoleName=name, PolicyName="all", PolicyDocument=document)

    def endpoint(self, name: str) -> dict[str, Any]:
        """Its description with its configuration's variant and its model's container."""
        sagemaker = self.client("sagemaker")
        found: dict[str, Any] = sagemaker.describe_endpoint(EndpointName=name)
        config = sagemaker.describe_endpoint_config(EndpointConfigName=found["EndpointConfigName"])
        variant = config["ProductionVariants"][0]
        model = sagemaker.describe_model(ModelName=variant["ModelName"])
        return found | {"config": config, "variant": variant, "model": model}


@contextlib.contextmanager
def cloud(folder: Path) -> Iterator[Cloud]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        made = Cloud(f"http://{host}:{port}", folder)
        with pytest.MonkeyPatch.context() as patch:
            fill_gaps(patch, made)
            yield made
        made.close()
    finally:
        server.stop()


def fill_gaps(patch: pytest.MonkeyPatch, made: Cloud) -> None:
    loader = botocore.loaders.create_loader()
    patch.setattr("botocore.session.create_loader", lambda *_: loader, raising=False)
    patch.setattr("botocore.loaders.create_loader", lambda *_: loader)
    patch.setattr(FakeEndpointConfig, "validate_instance_type", lambda self, name: None)
    record_calls(patch, made)
    endpoints_take_time(patch, made)
    patch.setattr(
        IamResponse, "simulate_principal_policy", simulate_principal_policy, raising=False
    )


def record_calls(patch: pytest.MonkeyPatch, made: Cloud) -> None:
    answer = BaseResponse.call_action

    def call_action(self: BaseResponse) -> Any:
        action = self._get_action()
        made.calls.append(action)
        if action in made.refused:
            body = {"__type": "ResourceLimitExceeded", "message": "The limit is 0 Instances."}
            return 400, {"x-amzn-errortype": body["__type"]}, json.dumps(body)
        return answer(self)

    patch.setattr(BaseResponse, "call_action", call_action)


def endpoints_take_time(patch: pytest.MonkeyPatch, made: Cloud) -> None:
    """A `pending` state that ends by itself, after which an endpoint is in service or gone."""
    create, describe = (
        SageMakerModelBackend.create_endpoint,
        SageMakerModelBackend.describe_endpoint,
    )
    delete = SageMakerModelBackend.delete_endpoint

    def begin(endpoint: FakeEndpoint, state: str) -> None:
        endpoint.endpoint_status = state
        endpoint.settled_at = time.monotonic() + made.settle_s

    def settle(self: SageMakerModelBackend, name: str) -> FakeEndpoint | None:
        endpoint = self.endpoints.get(name)
        if endpoint is None or time.monotonic() < endpoint.settled_at:
            return endpoint
        if endpoint.endpoint_status == "Deleting":
            delete(self, name)
            return None
        if endpoint.endpoint_status.endswith("ing"):
            endpoint.endpoint_status = "Failed" if made.failure else "InService"
            endpoint.failure_reason = made.failure
        return endpoint

    def refuse_if_busy(endpoint: FakeEndpoint | None, name: str) -> None:
        if endpoint is None:
            raise JsonRESTError("ValidationException", f'Could not find endpoint "{name}".')
        if endpoint.endpoint_status.endswith("ing"):
            raise JsonRESTError("ValidationException", "Cannot update in-progress endpoint.")

    def create_endpoint(self: Any, endpoint_name: str, **rest: Any) -> FakeEndpoint:
        endpoint = create(self, endpoint_name=endpoint_name, **rest)
        begin(endpoint, "Creating")
        return endpoint

    def describe_endpoint(self: Any, endpoint_name: str) -> dict[str, Any]:
        settle(self, endpoint_name)
        found = describe(self, endpoint_name)
        found.pop("SettledAt", None)
        return found

    def delete_endpoint(self: Any, endpoint_name: str) -> None:
        endpoint = settle(self, endpoint_name)
        refuse_if_busy(endpoint, endpoint_name)
        begin(endpoint, "Deleting")

    def update_endpoint(self: SageMakerResponse) -> ActionResult:
        backend = self.sagemaker_backend
        name, config_name = self._get_param("EndpointName"), self._get_param("EndpointConfigName")
        endpoint = settle(backend, name)
        refuse_if_busy(endpoint, name)
        config = backend.describe_endpoint_config(config_name)
        before = {v["VariantName"]: v for v in endpoint.production_variants}
        endpoint.endpoint_config_name = config_name
        endpoint.production_variants = endpoint._process_production_variants(
            config["ProductionVariants"]
        )
        if self._get_param("RetainAllVariantProperties"):
            for variant in endpoint.production_variants:
                variant["CurrentInstanceCount"] = before[variant["VariantName"]][
                    "CurrentInstanceCount"
                ]
        begin(endpoint, "Updating")
        return ActionResult({"EndpointArn": endpoint.arn})

    patch.setattr(FakeEndpoint, "settled_at", 0.0, raising=False)
    patch.setattr(SageMakerModelBackend, "create_endpoint", create_endpoint)
    patch.setattr(SageMakerModelBackend, "describe_endpoint", describe_endpoint)
    patch.setattr(SageMakerModelBackend, "delete_endpoint", delete_endpoint)
    patch.setattr(SageMakerResponse, "update_endpoint", update_endpoint, raising=False)


def simulate_principal_policy(self: IamResponse) -> ActionResult:
    role = self._get_param("PolicySourceArn").rpartition("/")[2]
    policies = [
        IAMPolicy(self.backend.get_role_policy(role, name)[1])
        for name in self.backend.list_role_policies(role)
    ]
    (resource,) = self._get_param("ResourceArns")
    results = []
    for action in self._get_param("ActionNames"):
        found = {policy.is_action_permitted(action, resource) for policy in policies}
        allowed = PermissionResult.PERMITTED in found and PermissionResult.DENIED not in found
        results.append(
            {
                "EvalActionName": action,
                "EvalResourceName": resource,
                "EvalDecision": "allowed" if allowed else "implicitDeny",
            }
        )
    return ActionResult({"EvaluationResults": results, "IsTruncated": False})
