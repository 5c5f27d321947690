"""kogpt2 status, logs and teardown of what kogpt2 deploy made; commands explain their errors."""

from __future__ import annotations

import json
import os
import pty
import time

import pytest

from tests.e2e.server import eventually
from tests.scripts.aws.cloud import BUCKET, MODELS, WIDE_S, Cloud

pytestmark = pytest.mark.slow

DEPLOY = ("--models", MODELS, "--instance-type", "ml.m5.large", "--instances", "2", "--yes")


@pytest.fixture
def deployed(aws: Cloud) -> Cloud:
    """`poems` beside a stranger's model."""
    aws.put_models(sowol=1 << 20)
    aws.put_image()
    aws.run("deploy", "poems", *DEPLOY)
    aws.client("sagemaker").create_model(ModelName="poems-of-somebody-else")
    aws.changes()
    return aws


def everything(aws: Cloud) -> list[str]:
    sagemaker, logs = aws.client("sagemaker"), aws.client("logs")
    found = [item["EndpointName"] for item in sagemaker.list_endpoints()["Endpoints"]]
    configs = sagemaker.list_endpoint_configs()["EndpointConfigs"]
    found += [item["EndpointConfigName"] for item in configs]
    found += [item["ModelName"] for item in sagemaker.list_models()["Models"]]
    found += [item["logGroupName"] for item in logs.describe_log_groups()["logGroups"]]
    return found + [item["RoleName"] for item in aws.client("iam").list_roles()["Roles"]]


def test_teardown_leaves_nothing_and_touches_nothing_else(deployed: Cloud) -> None:
    assert len(everything(deployed)) == 6
    assert "give --yes" in deployed.run("teardown", "poems", code=2)
    out = deployed.run("teardown", "poems", "--dry-run")
    assert "Endpoint, SageMaker::Endpoint" in out
    assert "they cost $0.230 an hour for 2 x ml.m5.large" in out
    assert deployed.changes() == []
    out = deployed.run("teardown", "poems", "--yes")
    assert everything(deployed) == ["poems-of-somebody-else"]
    assert f"not deleted: {MODELS}" in out
    assert "nothing else of poems is left" in out
    assert "there is nothing of poems" in deployed.run("teardown", "poems", "--yes")


def test_teardown_of_an_endpoint_that_is_being_made_waits(deployed: Cloud) -> None:
    deployed.busy = True
    deployed.stack("poems").status = "UPDATE_IN_PROGRESS"
    process = deployed.start("teardown", "poems", "--yes")
    eventually(lambda: deployed.calls.count("DescribeStackEvents") > 1, WIDE_S)
    assert "DeleteStack" not in deployed.calls
    deployed.finish()
    out, err = process.communicate(timeout=WIDE_S)
    assert process.returncode == 0, err
    assert "nothing else of poems is left" in out


@pytest.mark.parametrize(("answer", "left"), [("", 1), ("y", 0)])
def test_a_person_is_asked(aws: Cloud, answer: str, left: int) -> None:
    aws.put_models(sowol=1)
    screen, keyboard = pty.openpty()
    process = aws.start("upload", MODELS, "--delete", "sowol.tar.gz", stdin=keyboard)
    os.write(screen, f"{answer}\n".encode())
    out, _ = process.communicate(timeout=WIDE_S)
    os.close(screen)
    os.close(keyboard)
    assert "Delete 1 of 1 models? [y/N]" in out
    assert process.returncode == (2 if left else 0)
    assert len(aws.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])) == left


def test_status_tells_what_runs_and_what_it_costs(deployed: Cloud) -> None:
    out = deployed.run("status")
    assert out.startswith("poems\n  stack      CREATE_COMPLETE\n  endpoint   InService\n")
    assert f"  models     1 at {MODELS}, 1.0 MiB" in out
    assert "1 deployments in us-east-1, $0.230 an hour" in out
    (found,) = json.loads(deployed.run("status", "poems", "--json"))
    assert found["usd_per_hour"] == pytest.approx(0.23)
    assert deployed.run("status", "시", code=2) == "there is no deployment 시 in us-east-1"
    assert "0 deployments in eu-west-1" in deployed.run("status", "--region", "eu-west-1")


def test_logs_prints_what_the_container_wrote(deployed: Cloud) -> None:
    logs = deployed.client("logs")
    group = {"logGroupName": "/aws/sagemaker/Endpoints/poems"}
    now = int(time.time() * 1000)
    for stream, at, text in (("b", now - 1000, "둘째"), ("a", now - 5000, "첫째")):
        logs.create_log_stream(**group, logStreamName=stream)
        logs.put_log_events(
            **group, logStreamName=stream, logEvents=[{"timestamp": at, "message": text}]
        )
    lines = deployed.run("logs", "poems").splitlines()
    assert [line.split()[-1] for line in lines] == ["첫째", "둘째"]
    assert "둘째" not in deployed.run("logs", "poems", "--filter", "첫째")
    assert "no lines in the last 3600 s" in deployed.run("logs", "poems", "--filter", "없음")
    assert "no logs of gone" in deployed.run("logs", "gone", code=2)


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        (1, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials"),
        (2, {"AWS_REGION": "", "AWS_DEFAULT_REGION": ""}, "no region: give --region"),
        (2, {"AWS_PROFILE": "없음"}, "없음"),
        (1, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}, "a network?"),
    ],
)
def test_an_error_is_one_sentence(
    aws: Cloud, code: int, environment: dict[str, str], expected: str
) -> None:
    assert expected in aws.run("status", code=code, **environment)
