"""deploy/sagemaker/policies.yaml allows what the commands call and CloudFormation does for them,
and nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.client
import pytest
import yaml

from scripts.aws import template
from tests.engine.models import make_artifact
from tests.scripts.aws.cloud import MODELS, REGION, Cloud
from tests.scripts.aws.test_push import Docker

FILE = template.FILE.with_name("policies.yaml")
SCHEMAS = Path(str(importlib.util.find_spec("cfnlint").origin)).parent / "data" / "schemas"
LONGEST_POLICY = 6144  # characters that are no white space: IAM and STS quotas

# Operations whose actions have other names; () needs none.
ACTIONS: dict[str, tuple[str, ...]] = {
    "s3:HeadBucket": ("s3:ListBucket",),
    "s3:ListObjectsV2": ("s3:ListBucket",),
    "s3:HeadObject": ("s3:GetObject",),
    "s3:CreateMultipartUpload": ("s3:PutObject",),
    "s3:UploadPart": ("s3:PutObject",),
    "s3:CompleteMultipartUpload": ("s3:PutObject",),
    "s3:PutBucketLifecycleConfiguration": ("s3:PutLifecycleConfiguration",),
    "sts:GetCallerIdentity": (),
    "cloudformation:CreateChangeSet": (
        "cloudformation:CreateChangeSet",
        "cloudformation:TagResource",
    ),
    "ecr:CreateRepository": ("ecr:CreateRepository", "ecr:TagResource"),
}
SERVICES = {"sagemaker-runtime": "sagemaker"}
# What no run here calls: of a push by docker itself, and where an upload or a plan fails.
OTHERS = {
    *(f"ecr:{name}" for name in (
        "BatchCheckLayerAvailability", "BatchGetImage", "CompleteLayerUpload",
        "InitiateLayerUpload", "PutImage", "UploadLayerPart",
    )),
    "s3:AbortMultipartUpload",
}  # fmt: skip
# What CloudFormation needs for properties that endpoint.yaml does not set, by its schemas.
UNSET = re.compile(
    "application-autoscaling:(Put|Delete)ScheduledAction"
    "|firehose:.*|lambda:.*|s3:REST.*"
    "|iam:(AttachRolePolicy|DetachRolePolicy|.*PermissionsBoundary|Update.*)"
    "|kms:DescribeKey"  # --kms-key: whoever has the key grants it
    "|logs:.*(DataProtection|Kms|Index|ResourcePolic|LogDelivery|Bearer|DeletionProtection).*"
    "|logs:DeleteRetentionPolicy"
    "|sns:.*DataProtection.*"
)


@pytest.fixture(scope="module")
def statements() -> dict[str, list[dict[str, Any]]]:
    """Return statements by the policy's name, from where roles are made."""
    loaded = yaml.load(FILE.read_text("utf-8"), template._Loader)  # noqa: S506
    found = {}
    for name, resource in loaded["Resources"].items():
        given = resource["Properties"]["PolicyDocument"]["Statement"]
        found[name] = [one["Fn::If"][1] if "Fn::If" in one else one for one in given]
    return found


def actions(statements: list[dict[str, Any]]) -> set[str]:
    named = [statement["Action"] for statement in statements]
    return {action for one in named for action in (one if isinstance(one, list) else [one])}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operations of AWS that commands call from now on, as `service:Operation`."""
    found: set[str] = set()
    call = botocore.client.BaseClient._make_api_call

    def make_api_call(self: Any, operation: str, *arguments: Any) -> Any:
        service = self.meta.service_model.service_name
        found.add(f"{SERVICES.get(service, service)}:{operation}")
        return call(self, operation, *arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", make_api_call)
    return found


def of_cloudformation() -> Iterator[str]:
    """Return what CloudFormation does with the caller's rights for the template's resources."""
    names = json.loads((SCHEMAS / "providers" / f"{REGION}.json").read_text("utf-8"))
    for kind in {resource["Type"] for resource in template.template()["Resources"].values()}:
        schema = SCHEMAS / "resources" / f"{names[kind]}.json"
        for name, handler in json.loads(schema.read_text("utf-8"))["handlers"].items():
            if name != "list":
                yield from handler["permissions"]


@pytest.mark.slow
def test_the_deployer_may_do_what_the_commands_call_and_no_more(
    aws: Cloud, called: set[str], statements: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    docker = Docker(tmp_path)
    (tmp_path / "시").mkdir()
    model = make_artifact(tmp_path / "poems")
    large = tmp_path / "large"
    make_artifact(large, units=512, layers=1)  # more than one part of an upload
    aws.run("push", "kogpt2-serving:cpu", **docker.environment)
    aws.run("upload", MODELS, str(model), str(large), "--create-bucket")
    aws.run("upload", MODELS, "--delete", "large.tar.gz", "--yes")
    options = ("poems", "--models", MODELS, "--max-instances", "2", "--invocations", "9")
    aws.run("deploy", *options, "--dry-run")
    aws.run("deploy", *options, "--yes")
    aws.run("deploy", *options, "--env", "SHOW_EXAMPLES=true", "--dry-run")
    aws.run("status")
    aws.run("logs", "poems")
    aws.run("teardown", "poems", "--yes")
    assert {"s3:UploadPart", "sagemaker:InvokeEndpoint", "pricing:GetProducts"} <= called
    needed = {action for one in called for action in ACTIONS.get(one, (one,))} | OTHERS
    needed |= {action for action in of_cloudformation() if not UNSET.fullmatch(action)}
    assert actions(statements["Deployer"]) == needed


def test_the_caller_may_call_and_nothing_else(statements: dict[str, list[dict[str, Any]]]) -> None:
    assert actions(statements["Caller"]) == {
        "sagemaker:InvokeEndpoint",
        "sagemaker:InvokeEndpointAsync",
    }


def test_rights_are_for_named_resources_where_aws_lets_them_be(
    statements: dict[str, list[dict[str, Any]]],
) -> None:
    everywhere = [
        one
        for policy in statements.values()
        for one in policy
        if one["Resource"] == "*" and "Condition" not in one
    ]
    changing = {a for a in actions(everywhere) if not re.search(":(Describe|Get|List)", a)}
    assert {action.partition(":")[0] for action in changing} == {"application-autoscaling", "sns"}
    assert all("*" not in action for policy in statements.values() for action in actions(policy))


def test_they_fit_the_schemas_and_the_length_of_a_policy(
    statements: dict[str, list[dict[str, Any]]],
) -> None:
    from cfnlint import ManualArgs  # two seconds, which each worker would take
    from cfnlint.api import lint

    assert lint(FILE.read_text("utf-8"), config=ManualArgs(regions=[REGION])) == []
    for policy in statements.values():
        text = json.dumps(policy, separators=(",", ":"))
        filled = re.sub(r"\$\{[\w:]+\}", "x" * 20, text)
        assert len(filled) < LONGEST_POLICY
