"""kogpt2 deploy makes, keeps, resumes and updates; and says before what AWS would refuse."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import Any

import pytest

from tests.e2e.server import eventually
from tests.scripts.aws.cloud import BUCKET, MODELS, WIDE_S, Cloud

MIB = 1 << 20
BASIC = ("poems", "--models", MODELS, "--create-role", "--instance-type", "ml.m5.large", "--yes")
LIMITS = ("--autoscale", "1:4:200")


@pytest.fixture
def ready(aws: Cloud) -> Cloud:
    """An account with an image and two models."""
    aws.put_models(sowol=1000, dongju=2000)
    aws.put_image()
    aws.calls.clear()
    return aws


def tags(aws: Cloud, arn: str) -> dict[str, str]:
    found = aws.client("sagemaker").list_tags(ResourceArn=arn)["Tags"]
    return {tag["Key"]: tag["Value"] for tag in found}


def target(aws: Cloud) -> dict[str, Any] | None:
    scaling = aws.client("application-autoscaling")
    found = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    return found[0] if found else None


def test_first_run_makes_a_multi_model_endpoint(ready: Cloud) -> None:
    out = ready.run("deploy", *BASIC, "--env", "ENGINE_BACKEND=onnxruntime", "--tag", "팀=시인")
    endpoint = ready.endpoint("poems")
    assert endpoint["EndpointStatus"] == "InService"
    container = endpoint["model"]["PrimaryContainer"]
    assert container["Mode"] == "MultiModel"
    assert container["ModelDataUrl"] == MODELS
    assert container["MultiModelConfig"] == {"ModelCacheSetting": "Enabled"}
    assert container["Environment"] == {"ENGINE_BACKEND": "onnxruntime"}
    assert re.search(r"/kogpt2-serving@sha256:[0-9a-f]{64}$", container["Image"])
    assert endpoint["variant"]["InstanceType"] == "ml.m5.large"
    for arn in (endpoint["EndpointArn"], endpoint["model"]["ModelArn"]):
        assert tags(ready, arn) == {"kogpt2-serving": "poems", "팀": "시인"}
    assert re.search(r"^model +poems-[0-9a-f]{10} made, \d+\.\d s$", out, re.M)
    assert re.search(r"^costs \$0\.115 an hour .*prices change\)$", out, re.M)
    logs = ready.client("logs").describe_log_groups()["logGroups"]
    assert [(g["logGroupName"], g["retentionInDays"]) for g in logs] == [
        ("/aws/sagemaker/Endpoints/poems", 30)
    ]


def test_second_run_changes_nothing(ready: Cloud) -> None:
    ready.run("deploy", *BASIC, *LIMITS)
    assert ready.changes()
    out = ready.run("deploy", *BASIC, *LIMITS)
    assert ready.changes() == []
    assert "nothing to change" in out
    assert not re.search("^  (make|update|remove)", out, re.M)


def test_dry_run_shows_the_calls_and_makes_none(ready: Cloud) -> None:
    out = ready.run("deploy", *BASIC, *LIMITS, "--dry-run", "--env", "HF_TOKEN=hf_secret")
    assert ready.changes() == []
    lines = re.findall(r"^  aws (\S+ \S+) --cli-input-json '(.*)'$", out, re.M)
    assert [call for call, _ in lines] == [
        "iam create-role",
        "iam put-role-policy",
        "logs create-log-group",
        "logs put-retention-policy",
        "sagemaker create-model",
        "sagemaker create-endpoint-config",
        "sagemaker create-endpoint",
        "application-autoscaling register-scalable-target",
        "application-autoscaling put-scaling-policy",
    ]
    assert json.loads(lines[4][1])["PrimaryContainer"]["Environment"] == {"HF_TOKEN": "***"}
    assert "hf_secret" not in out
    assert " made," not in out


def test_an_interrupted_run_goes_on(ready: Cloud) -> None:
    ready.settle_s = 600
    process = ready.start("deploy", *BASIC, *LIMITS)
    eventually(lambda: "CreateEndpoint" in ready.calls, WIDE_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WIDE_S)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert target(ready) is None
    ready.changes()
    process = ready.start("deploy", *BASIC, *LIMITS)
    eventually(lambda: ready.calls.count("DescribeEndpoint") > 1, WIDE_S)
    finish(ready)
    out, err = process.communicate(timeout=WIDE_S)
    assert process.returncode == 0, err
    assert "await   endpoint poems, which is Creating" in out
    assert "endpoint poems: Creating, " in err
    assert ready.changes() == ["RegisterScalableTarget", "PutScalingPolicy"]
    assert target(ready) is not None


def finish(aws: Cloud) -> None:
    """Lets what is pending end now."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.sagemaker.models import sagemaker_backends

    aws.settle_s = 0.0
    for endpoint in sagemaker_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].endpoints.values():
        endpoint.settled_at = 0.0


def test_a_run_after_a_refusal_of_aws_goes_on(ready: Cloud) -> None:
    ready.refused.add("CreateEndpoint")
    said = ready.run("deploy", *BASIC, code=1)
    assert said == "CreateEndpoint: ResourceLimitExceeded: The limit is 0 Instances."
    ready.refused.clear()
    ready.changes()
    ready.run("deploy", *BASIC)
    assert ready.changes() == ["CreateEndpoint"]


def test_other_options_update_in_place(ready: Cloud) -> None:
    ready.run("deploy", *BASIC, *LIMITS)
    before = ready.endpoint("poems")
    ready.changes()
    out = ready.run("deploy", *BASIC, *LIMITS, "--env", "ENGINE_BACKEND=onnxruntime")
    assert "update  endpoint poems" in out
    changes = ready.changes()
    assert changes.count("UpdateEndpoint") == 1
    assert "DeregisterScalableTarget" not in changes
    after = ready.endpoint("poems")
    assert after["CreationTime"] == before["CreationTime"]
    assert after["model"]["ModelName"] != before["model"]["ModelName"]


def test_another_instance_type_deregisters_the_scaling_first(ready: Cloud) -> None:
    ready.run("deploy", *BASIC, *LIMITS)
    ready.changes()
    ready.run("deploy", *BASIC, *LIMITS, "--instance-type", "ml.m5.xlarge")
    changes = ready.changes()
    order = ["DeregisterScalableTarget", "UpdateEndpoint", "RegisterScalableTarget"]
    assert [change for change in changes if change in order] == order
    assert ready.endpoint("poems")["variant"]["InstanceType"] == "ml.m5.xlarge"
    found = target(ready)
    assert found is not None
    assert (found["MinCapacity"], found["MaxCapacity"]) == (1, 4)


def test_scaling_follows_the_options(ready: Cloud) -> None:
    ready.run("deploy", *BASIC, *LIMITS, "--scale-in-cooldown", "500")
    scaling = ready.client("application-autoscaling")
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert policy["TargetTrackingScalingPolicyConfiguration"] == {
        "TargetValue": 200.0,
        "PredefinedMetricSpecification": {
            "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
        },
        "ScaleOutCooldown": 60,
        "ScaleInCooldown": 500,
    }
    out = ready.run("deploy", *BASIC)
    assert "remove  auto-scaling" in out
    assert target(ready) is None


def test_single_model_asynchronous_endpoint(ready: Cloud) -> None:
    topic = "arn:aws:sns:us-east-1:123456789012:done"
    ready.run(
        "deploy", "one", "--model", f"{MODELS}sowol.tar.gz", "--create-role", "--yes",
        "--instance-type", "ml.c5.large", "--async", f"s3://{BUCKET}/answers",
        "--success-topic", topic, "--autoscale", "0:2:5",
    )  # fmt: skip
    endpoint = ready.endpoint("one")
    container = endpoint["model"]["PrimaryContainer"]
    assert container["ModelDataUrl"] == f"{MODELS}sowol.tar.gz"
    assert "MultiModelConfig" not in container
    output = endpoint["config"]["AsyncInferenceConfig"]["OutputConfig"]
    assert output["S3OutputPath"] == f"s3://{BUCKET}/answers/"
    assert output["NotificationConfig"] == {"SuccessTopic": topic}
    document = ready.client("iam").get_role_policy(
        RoleName="one-us-east-1-sagemaker", PolicyName="kogpt2-serving"
    )["PolicyDocument"]
    allowed = {
        (action, statement["Resource"])
        for statement in document["Statement"]
        for action in statement["Action"]
    }
    assert ("sns:Publish", topic) in allowed
    assert ("s3:PutObject", f"arn:aws:s3:::{BUCKET}/answers/*") in allowed


def test_serverless_and_data_capture_and_vpc(ready: Cloud) -> None:
    model = ("--model", f"{MODELS}sowol.tar.gz", "--create-role", "--yes")
    out = ready.run("deploy", "rare", *model, "--serverless", "4096:5")
    variant = ready.endpoint("rare")["variant"]
    assert variant["ServerlessConfig"] == {"MemorySizeInMB": 4096, "MaxConcurrency": 5}
    assert "nothing while idle, $0.00008 for each second" in out
    ready.run(
        "deploy", "seen", *model, "--instance-type", "ml.m5.large", "--kms-key", "key-1",
        "--data-capture", f"s3://{BUCKET}/seen/", "--data-capture-percent", "5",
        "--subnets", "subnet-1,subnet-2", "--security-groups", "sg-1",
    )  # fmt: skip
    endpoint = ready.endpoint("seen")
    capture = endpoint["config"]["DataCaptureConfig"]
    assert capture["InitialSamplingPercentage"] == 5
    assert capture["DestinationS3Uri"] == f"s3://{BUCKET}/seen/"
    assert endpoint["config"]["KmsKeyId"] == "key-1"
    assert endpoint["model"]["VpcConfig"] == {
        "Subnets": ["subnet-1", "subnet-2"],
        "SecurityGroupIds": ["sg-1"],
    }


def test_another_serving_image_with_its_own_model(ready: Cloud) -> None:
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/huggingface-pytorch-tgi-inference:2.7"
    ready.run(
        "deploy", "llm", "--image", image, "--env", "HF_MODEL_ID=skt/kogpt2-base-v2",
        "--instance-type", "ml.g5.xlarge", "--startup-timeout", "900", "--create-role", "--yes",
        "--ami", "al2023-ami-sagemaker-inference-gpu-4-1",
    )  # fmt: skip
    endpoint = ready.endpoint("llm")
    assert endpoint["variant"]["InferenceAmiVersion"].startswith("al2023-")
    container = endpoint["model"]["PrimaryContainer"]
    assert container["Image"] == image
    assert container["Environment"] == {"HF_MODEL_ID": "skt/kogpt2-base-v2"}
    assert "ModelDataUrl" not in container
    assert endpoint["variant"]["ContainerStartupHealthCheckTimeoutInSeconds"] == 900


def test_the_cheapest_instance_that_holds_the_models(aws: Cloud) -> None:
    aws.put_image()
    aws.put_models(a=3 * MIB, b=3 * MIB)
    options = ("poems", "--models", MODELS, "--create-role", "--dry-run")
    # 8 models of 700 MiB do not fit into 8 GiB less the reserve and the K/V caches, but into 16.
    size = ("--models-in-memory", "8", "--memory-per-model", "700")
    out = aws.run("deploy", *options, *size)
    assert re.search(r"ml\.m5\.large .* 7 +too small", out)
    assert re.search(r"ml\.r5\.large .*<- chosen", out)
    assert "1 x ml.r5.large" in out
    assert "prices of 2025-08; prices change" in out
    said = aws.run("deploy", *options, *size, "--budget", "0.15", code=2)
    assert "nothing under $0.15 an hour holds 8 models; ml.r5.large does for $0.151" in said
    out = aws.run("deploy", *options, "--autoscale", "1:2:9", "--budget", "0.25")
    assert re.search(r"ml\.t2\.medium .*burstable", out)
    assert "1 x ml.c5.large, up to $0.204 when scaled to 2" in out


def test_missing_permissions_are_named(ready: Cloud) -> None:
    ready.put_role(
        "small",
        {"Effect": "Allow", "Action": ["ecr:*", "cloudwatch:*"], "Resource": "*"},
        {"Effect": "Allow", "Action": "logs:*", "Resource": "arn:aws:logs:*:*:*/Endpoints/poems:*"},
        {
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": f"arn:aws:s3:::{BUCKET}/kogpt2/*.tar.gz",
        },
    )
    options = ("poems", "--models", MODELS, "--instance-type", "ml.m5.large", "--yes")
    ready.changes()
    said = ready.run("deploy", *options, "--role", "small", code=2)
    assert said == f"role small lacks 1: s3:ListBucket on arn:aws:s3:::{BUCKET}"
    assert ready.changes() == []
    ready.put_role("full", {"Effect": "Allow", "Action": "*", "Resource": "*"})
    out = ready.run("deploy", *options, "--role", "full")
    assert "role full may do all" in out
    assert ready.client("iam").list_role_policies(RoleName="full")["PolicyNames"] == ["all"]


def test_wrong_surroundings_are_named_before_anything_is_made(ready: Cloud) -> None:
    options = ("--create-role", "--instance-type", "ml.m5.large", "--yes")
    cases = [
        (("--models", "s3://nowhere/x/"), "there is no bucket nowhere"),
        (("--models", f"s3://{BUCKET}/empty/"), f"no *.tar.gz at s3://{BUCKET}/empty/"),
        (("--models", MODELS, "--region", "eu-west-1"),
         f"bucket {BUCKET} is in us-east-1, this works in eu-west-1"),
        (("--models", MODELS, "--region", "us-esat-1"), "did you mean us-west-1 or us-east-1"),
        (("--models", MODELS, "--image", "kogpt2-serving:cpu"), "is not in ECR"),
        (("--models", "시인들"), "시인들 is not s3://bucket/prefix/"),
    ]  # fmt: skip
    for given, expected in cases:
        assert expected in ready.run("deploy", "poems", *given, *options, code=2)
    said = ready.run("deploy", "poems", "--models", MODELS, "--role", "gone", "--yes", code=2)
    assert said == "there is no role gone; --create-role makes one"
    assert ready.changes() == []


def test_an_endpoint_of_somebody_else_is_left_alone(ready: Cloud) -> None:
    ready.run("deploy", *BASIC)
    arn = ready.endpoint("poems")["EndpointArn"]
    ready.client("sagemaker").delete_tags(ResourceArn=arn, TagKeys=["kogpt2-serving"])
    ready.changes()
    said = ready.run("deploy", *BASIC, "--env", "A=B", code=2)
    assert "that kogpt2 deploy did not make" in said
    assert ready.changes() == []


def test_nobody_to_ask_means_no_change(ready: Cloud) -> None:
    said = ready.run("deploy", *BASIC[:-1], code=2)
    assert "give --yes" in said
    assert ready.changes() == []


def test_a_failed_endpoint_is_explained_and_then_replaced(ready: Cloud) -> None:
    ready.failure = "The primary container did not pass the ping health check."
    said = ready.run("deploy", *BASIC, code=2)
    assert said.startswith(f"endpoint poems is Failed: {ready.failure}")
    ready.failure = None
    out = ready.run("deploy", *BASIC)
    assert "replace endpoint poems, which is Failed" in out
    assert ready.changes()[-2:] == ["DeleteEndpoint", "CreateEndpoint"]
    assert ready.endpoint("poems")["EndpointStatus"] == "InService"


def test_an_endpoint_with_instances_does_not_become_serverless(ready: Cloud) -> None:
    one = ("one", "--model", f"{MODELS}sowol.tar.gz", "--create-role", "--yes")
    ready.run("deploy", *one, "--instance-type", "ml.c5.large")
    said = ready.run("deploy", *one, "--serverless", "2048:1", code=2)
    assert "cannot become serverless" in said


def test_the_newest_tagged_image_is_taken(ready: Cloud) -> None:
    time.sleep(1.1)  # ECR counts in seconds
    newest = ready.put_image("v2")
    ready.run("deploy", *BASIC)
    assert ready.endpoint("poems")["model"]["PrimaryContainer"]["Image"] == newest
    old = newest.partition("@")[0] + ":v1"
    ready.run("deploy", *BASIC, "--image", old)
    assert ready.endpoint("poems")["model"]["PrimaryContainer"]["Image"] != newest
    said = ready.run("deploy", *BASIC, "--image", old.replace(":v1", ":v9"), code=2)
    assert said.endswith(":v9: kogpt2 push puts it there")
