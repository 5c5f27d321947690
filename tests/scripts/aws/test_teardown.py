"""kogpt2 status, logs and teardown find by tag what kogpt2 deploy made."""

from __future__ import annotations

import json
import os
import pty
import time

import pytest

from tests.e2e.server import eventually
from tests.scripts.aws.cloud import BUCKET, MODELS, TRUST, WIDE_S, Cloud

pytestmark = pytest.mark.slow

DEPLOY = (
    "--models", MODELS, "--create-role", "--instance-type", "ml.m5.large",
    "--autoscale", "2:4:100", "--yes",
)  # fmt: skip


@pytest.fixture
def deployed(aws: Cloud) -> Cloud:
    """`poems`, updated once, beside `prose` and a stranger's model."""
    aws.put_models(sowol=1 << 20)
    aws.put_image()
    aws.run("deploy", "poems", *DEPLOY)
    aws.run("deploy", "poems", *DEPLOY, "--env", "ENGINE_BACKEND=onnxruntime")
    aws.client("sagemaker").create_model(ModelName="poems-of-somebody-else")
    aws.changes()
    return aws


def everything(aws: Cloud) -> list[str]:
    sagemaker = aws.client("sagemaker")
    found = [item["EndpointName"] for item in sagemaker.list_endpoints()["Endpoints"]]
    configs = sagemaker.list_endpoint_configs()["EndpointConfigs"]
    found += [item["EndpointConfigName"] for item in configs]
    found += [item["ModelName"] for item in sagemaker.list_models()["Models"]]
    scaling = aws.client("application-autoscaling")
    targets = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    found += [item["ResourceId"] for item in targets]
    found += [
        item["logGroupName"] for item in aws.client("logs").describe_log_groups()["logGroups"]
    ]
    return found + [item["RoleName"] for item in aws.client("iam").list_roles()["Roles"]]


def test_teardown_leaves_nothing_and_touches_nothing_else(deployed: Cloud) -> None:
    deployed.settle_s = 1.0
    out = deployed.run("teardown", "poems", "--yes")
    assert everything(deployed) == ["poems-of-somebody-else"]
    changes = deployed.changes()
    order = [
        "DeregisterScalableTarget",
        "DeleteEndpoint",
        "DeleteEndpointConfig",
        "DeleteModel",
        "DeleteLogGroup",
        "DeleteRolePolicy",
        "DeleteRole",
    ]
    assert list(dict.fromkeys(changes)) == order
    assert changes.count("DeleteModel") == 2
    assert "they cost      $0.230 an hour for 2 x ml.m5.large" in out
    assert f"not deleted: {MODELS}: 1 objects, 1.0 MiB" in out
    assert "nothing of poems is left" in out
    assert "there is nothing of poems" in deployed.run("teardown", "poems", "--yes")
    assert deployed.changes() == []


def test_teardown_of_an_endpoint_that_is_being_made_waits(aws: Cloud) -> None:
    aws.put_models(sowol=1)
    aws.put_image()
    aws.settle_s = 4.0
    process = aws.start("deploy", "poems", *DEPLOY)
    eventually(lambda: "CreateEndpoint" in aws.calls, WIDE_S)
    process.kill()
    process.communicate(timeout=WIDE_S)
    out = aws.run("teardown", "poems", "--yes")
    assert "nothing of poems is left" in out
    assert everything(aws) == []


def test_teardown_of_one_deployment_leaves_the_others(deployed: Cloud) -> None:
    deployed.run("deploy", "prose", *DEPLOY)
    before = [name for name in everything(deployed) if "prose" in name]
    deployed.run("teardown", "poems", "--keep-logs", "--yes")
    after = everything(deployed)
    assert [name for name in after if "prose" in name] == before
    assert "/aws/sagemaker/Endpoints/poems" in after


def test_what_others_gave_the_same_name_stays(aws: Cloud) -> None:
    sagemaker, name = aws.client("sagemaker"), "poems"
    aws.client("logs").create_log_group(logGroupName=f"/aws/sagemaker/Endpoints/{name}")
    aws.client("iam").create_role(
        RoleName=f"{name}-us-east-1-sagemaker", AssumeRolePolicyDocument=json.dumps(TRUST)
    )
    sagemaker.create_model(ModelName=name)
    variant = {"VariantName": "AllTraffic", "ModelName": name, "InstanceType": "ml.m5.large"}
    sagemaker.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant])
    sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=name)
    aws.client("application-autoscaling").register_scalable_target(
        ServiceNamespace="sagemaker",
        ResourceId=f"endpoint/{name}/variant/AllTraffic",
        ScalableDimension="sagemaker:variant:DesiredInstanceCount",
        MinCapacity=1,
        MaxCapacity=2,
    )
    before = everything(aws)
    assert len(before) == 6
    assert "there is nothing of poems" in aws.run("teardown", name, "--yes")
    assert everything(aws) == before


def test_teardown_shows_and_asks_first(deployed: Cloud) -> None:
    before = everything(deployed)
    assert "give --yes" in deployed.run("teardown", "poems", code=2)
    out = deployed.run("teardown", "poems", "--dry-run")
    assert out.count("\n  aws ") == 9
    assert everything(deployed) == before
    assert deployed.changes() == []


@pytest.mark.parametrize(("answer", "left"), [("n", 1), ("", 1), ("y", 0)])
def test_a_person_is_asked(aws: Cloud, answer: str, left: int) -> None:
    aws.put_models(sowol=1)
    screen, keyboard = pty.openpty()
    process = aws.start("upload", MODELS, "--delete", "sowol.tar.gz", stdin=keyboard)
    os.write(screen, f"{answer}\n".encode())
    out, _ = process.communicate(timeout=30)
    os.close(screen)
    os.close(keyboard)
    assert "Delete 1 of 1 models? [y/N]" in out
    assert process.returncode == (2 if left else 0)
    assert len(aws.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])) == left


def test_everything_includes_what_push_and_upload_made(deployed: Cloud) -> None:
    s3, ecr = deployed.client("s3"), deployed.client("ecr")
    tag = {"Key": "kogpt2-serving", "Value": "shared"}
    ecr.create_repository(repositoryName="made-by-push", tags=[tag])
    s3.put_bucket_tagging(Bucket=BUCKET, Tagging={"TagSet": [tag]})
    s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    s3.put_object(Bucket=BUCKET, Key="kogpt2/sowol.tar.gz", Body=b"again")
    s3.create_bucket(Bucket="somebody-elses")
    deployed.run("teardown", "poems", "--everything", "--yes")
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["somebody-elses"]
    repositories = ecr.describe_repositories()["repositories"]
    assert [item["repositoryName"] for item in repositories] == ["kogpt2-serving"]  # has no tag


def test_status_tells_what_runs_and_what_it_costs(deployed: Cloud) -> None:
    out = deployed.run("status")
    assert "poems: InService" in out
    assert "runs on    2 x ml.m5.large" in out
    assert "scales     from 2 to 4 instances" in out
    assert "1 of them, 1.0 MiB" in out
    assert "1 deployments in us-east-1, $0.230 an hour in all" in out
    (found,) = json.loads(deployed.run("status", "poems", "--json"))
    assert found["models"] == {"sowol.tar.gz": 1 << 20}
    assert found["usd_per_hour"] == pytest.approx(0.23)
    assert len(found["resources"]) == 8
    assert deployed.run("status", "시", code=2) == "nothing of 시 in us-east-1"
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
    assert "nothing since 3 s" in deployed.run("logs", "poems", "--since", "3s", "--filter", "첫")
    assert "no logs of gone" in deployed.run("logs", "gone", code=2)
