"""What SageMaker does not serve is refused with its reason; commands explain their errors."""

from __future__ import annotations

import shlex

import click
import pytest
import typer

from scripts import cli
from scripts.aws import account
from scripts.aws.deploy_options import Deploy
from scripts.aws.refusals import refuse
from scripts.lib.problem import Problem
from tests.scripts.aws.cloud import MODELS, Cloud

MANY = "x --models s3://b/p/ --role r"
ONE = "x --model s3://b/p/m.tar.gz --role r"
TRITON = "785573368785.dkr.ecr.us-east-1.amazonaws.com/sagemaker-tritonserver:24.01-py3"


def asked(line: str) -> Deploy:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    return Deploy(**group.commands["deploy"].make_context("deploy", shlex.split(line)).params)


@pytest.mark.parametrize(
    ("options", "reason", "page"),
    [
        (f"{MANY} --serverless 2048:1", "host one model", "Serverless Inference"),
        (f"{ONE} --serverless 2048:1 --autoscale 1:2:3", "scale by themselves", "Serverless"),
        (f"{ONE} --serverless 2048:1 --data-capture s3://b/c", "do not capture", "Serverless"),
        (f"{ONE} --serverless 2048:1 --subnets a --security-groups b", "in a VPC", "Serverless"),
        (f"{ONE} --serverless 2048:1 --async s3://b/o", "either serverless or", "Asynchronous"),
        (f"{ONE} --serverless 2048:1 --budget 1", "no instances to choose", "Serverless"),
        (f"{ONE} --serverless 2048:1 --startup-timeout 90", "start-up timeout", "CreateEndpoint"),
        (f"{MANY} --instance-type ml.g4dn.xlarge", "NVIDIA Triton", "multi-model endpoints"),
        (f"{MANY} --instance-type ml.inf1.xlarge", "run on CPU", "multi-model endpoints"),
        (f"{MANY} --async s3://b/o", "cannot name a TargetModel", "InvokeEndpointAsync"),
        (f"{ONE} --async s3://b/o --data-capture s3://b/c", "real-time", "Capture data"),
        (f"{ONE} --autoscale 1:2:3 --instance-type ml.t2.large", "burstable", "scaling"),
        (f"{ONE} --autoscale 0:2:3", "only asynchronous", "scaling"),
        (f"{ONE} --kms-key k --instance-type ml.g5.xlarge", "local disk", "CreateEndpointConfig"),
        (f"{ONE} --kms-key k --instance-type ml.m5d.xlarge", "local disk", "CreateEndpointConfig"),
    ],
)
def test_refused(options: str, reason: str, page: str) -> None:
    with pytest.raises(Problem) as refused:
        refuse(asked(options))
    said, _, named = str(refused.value).partition("AWS documentation: ")
    assert reason in said
    assert page in named


@pytest.mark.parametrize(
    "options",
    [
        f"{MANY} --autoscale 1:2:3 --data-capture s3://b/c --instance-type ml.m5.large",
        f"{MANY} --image {TRITON} --instance-type ml.g4dn.xlarge",
        f"{ONE} --instance-type ml.g5.xlarge",
        f"{ONE} --async s3://b/o --autoscale 0:2:3",
        f"{ONE} --serverless 2048:1",
        f"{ONE} --kms-key k --instance-type ml.m5.large",
    ],
)
def test_served(options: str) -> None:
    refuse(asked(options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("시 --models s3://b/p/ --role r", "letters, digits and -"),
        ("x --role r", "give --models, --model or --image"),
        (f"{MANY} --create-role", "--role or --create-role"),
        (f"{ONE} --autoscale 3:2:1", "MIN must not be above MAX"),
        (f"{ONE} --autoscale many", "is not MIN:MAX:TARGET"),
        (f"{ONE} --serverless 1000:1", "memory is 1024"),
        (f"{MANY} --env A", "is not NAME=VALUE"),
        (f"{ONE} --subnets a", "go together"),
    ],
)
def test_wrong_options(options: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["deploy", *shlex.split(options)]) == 2
    assert reason in capsys.readouterr().err


def test_errors_are_one_sentence(aws: Cloud, unused: str) -> None:
    cases = [
        (1, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials"),
        (2, {"AWS_REGION": "", "AWS_DEFAULT_REGION": ""}, "no region: give --region"),
        (2, {"AWS_PROFILE": "없음"}, "없음"),
        (1, {"AWS_ENDPOINT_URL": unused, "AWS_MAX_ATTEMPTS": "1"}, "is there a network?"),
    ]
    for code, environment, expected in cases:
        assert expected in aws.run("status", code=code, **environment)


@pytest.fixture
def unused() -> str:
    from tests.e2e.server import free_port

    return f"http://127.0.0.1:{free_port()}"


def test_secrets_are_not_printed() -> None:
    shown = account.as_command(
        "sagemaker",
        "create_model",
        {"Environment": {"HF_TOKEN": "a", "API_KEY": "b", "시인": "김소월"}, "KmsKeyId": "key-1"},
    )
    assert '"HF_TOKEN": "***", "API_KEY": "***", "시인": "김소월"' in shown
    assert "key-1" in shown
    assert MODELS not in shown
