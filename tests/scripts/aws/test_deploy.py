"""kogpt2 deploy shows a priced change set, carries it out, and says before what AWS refuses."""

from __future__ import annotations

import json
import os
import pty
import re
from collections.abc import Iterator

import pytest

from tests.e2e.server import eventually
from tests.fleet.upstream import upstreams
from tests.scripts.aws.cloud import MODELS, WIDE_S, Cloud

MIB = 1 << 20
BASIC = ("poems", "--models", MODELS, "--instance-type", "ml.m5.large", "--yes")
ON_GPU = ("odes", "--model", f"{MODELS}sowol.tar.gz", "--instance-type", "ml.g5.xlarge", "--yes")
LIMITS = ("--max-instances", "4", "--invocations", "200")


@pytest.fixture
def ready(aws: Cloud) -> Cloud:
    """An account with an image and two models."""
    aws.put_models(sowol=1000, dongju=2000)
    aws.put_image()
    aws.calls.clear()
    return aws


def parameters(aws: Cloud) -> dict[str, str]:
    (stack,) = aws.client("cloudformation").describe_stacks(StackName="poems")["Stacks"]
    return {item["ParameterKey"]: item["ParameterValue"] for item in stack["Parameters"]}


def test_first_run_makes_a_multi_model_endpoint(ready: Cloud) -> None:
    out = ready.run("deploy", *BASIC, "--env", "HF_TOKEN=비밀", "--tag", "팀=시인")
    assert "비밀" not in out
    endpoint = ready.endpoint("poems")
    container = endpoint["model"]["PrimaryContainer"]
    assert container["Mode"] == "MultiModel"
    assert container["ModelDataUrl"] == MODELS
    assert container["Environment"] == {"HF_TOKEN": "비밀"}
    assert re.search(r"/kogpt2-serving@sha256:[0-9a-f]{64}$", container["Image"])
    assert endpoint["variant"]["InstanceType"] == "ml.m5.large"
    assert ready.stack("poems").tags == {"kogpt2-serving": "poems", "팀": "시인"}
    (group,) = ready.client("logs").describe_log_groups()["logGroups"]
    assert group["retentionInDays"] == 30
    shown, _, happened = out.partition("CREATE_IN_PROGRESS")
    assert "add     Endpoint, SageMaker::Endpoint" in shown
    assert re.search(r"^  costs \$0\.115 an hour .*prices change.*\)$", shown, re.M)
    assert "poems is in service; it costs $0.115 an hour" in happened


def test_second_run_changes_nothing_and_another_updates(ready: Cloud) -> None:
    ready.run("deploy", *BASIC)
    ready.changes()
    assert "nothing to change" in ready.run("deploy", *BASIC)
    assert "ExecuteChangeSet" not in ready.changes()
    out = ready.run("deploy", *BASIC, "--env", "ENGINE_BACKEND=native")
    assert "modify  ServedModel, SageMaker::Model" in out
    assert "UPDATE_COMPLETE" in out
    out = ready.run("deploy", *BASIC, *LIMITS)
    assert "costs $0.115 an hour for 1 x ml.m5.large, up to $0.460 when scaled to 4" in out
    assert parameters(ready)["MaxInstances"] == "4"
    said = ready.run("deploy", *BASIC, *LIMITS, "--instance-type", "ml.m5.xlarge", code=2)
    assert "once without --max-instances" in said


def test_dry_run_and_nobody_to_ask_leave_no_resources_behind(ready: Cloud) -> None:
    out = ready.run("deploy", *BASIC[:-1], "--dry-run")
    assert "add     Endpoint, SageMaker::Endpoint" in out
    assert ready.changes() == ["CreateChangeSet", "DeleteChangeSet"]
    assert "give --yes" in ready.run("deploy", *BASIC[:-1], code=2)
    assert ready.changes() == ["CreateChangeSet", "DeleteChangeSet"]
    assert ready.stack("poems").status == "REVIEW_IN_PROGRESS"
    ready.run("teardown", "poems", "--yes")
    assert "there is nothing of poems" in ready.run("teardown", "poems", "--yes")
    ready.run("deploy", *BASIC[:-1], "--dry-run")
    ready.run("deploy", *BASIC)
    assert "give --yes" in ready.run("deploy", *BASIC[:-1], *LIMITS, code=2)
    assert ready.stack("poems").status == "CREATE_COMPLETE"
    assert parameters(ready)["MaxInstances"] == "0"


@pytest.mark.slow
def test_no_at_the_question_leaves_what_another_terminal_has_deployed_since(ready: Cloud) -> None:
    screen, keyboard = pty.openpty()
    process = ready.start("deploy", *BASIC[:-1], stdin=keyboard)
    eventually(lambda: "DescribeChangeSet" in ready.calls, WIDE_S)
    ready.run("deploy", *BASIC)
    os.write(screen, b"n\n")
    _, err = process.communicate(timeout=WIDE_S)
    os.close(screen)
    os.close(keyboard)
    assert process.returncode in (0, 2), err
    assert ready.stack("poems").status == "CREATE_COMPLETE"
    assert ready.endpoint("poems")["EndpointStatus"] == "InService"


@pytest.mark.slow
def test_a_run_waits_for_the_stack_and_another_for_what_was_begun(ready: Cloud) -> None:
    ready.busy = True
    process = ready.start("deploy", *BASIC)
    eventually(lambda: ready.calls.count("DescribeStackEvents") > 1, WIDE_S)
    process.kill()
    process.communicate(timeout=WIDE_S)
    assert ready.stack("poems").status == "CREATE_IN_PROGRESS"
    ready.calls.clear()
    process = ready.start("deploy", *BASIC)
    eventually(lambda: ready.calls.count("DescribeStackEvents") > 1, WIDE_S)
    assert "CreateChangeSet" not in ready.calls
    ready.finish()
    out, err = process.communicate(timeout=WIDE_S)
    assert process.returncode == 0, err
    assert "nothing to change" in out


def test_a_failure_is_told_with_its_reason(ready: Cloud) -> None:
    ready.failure = "The primary container did not pass the ping health check. 시"
    said = ready.run("deploy", *BASIC, code=2)
    assert said.startswith("stack poems is ROLLBACK_COMPLETE; poems: The primary container")
    assert "kogpt2 teardown poems removes it" in ready.run("deploy", *BASIC, code=2)


def test_the_cheapest_instance_that_holds_the_models(aws: Cloud) -> None:
    aws.put_image()
    aws.put_models(a=3 * MIB, b=3 * MIB)
    options = ("poems", "--models", MODELS, "--dry-run")
    # 8 models of 740 MiB do not fit into 8 GiB less the reserve and the K/V caches, but into 16.
    size = ("--models-in-memory", "8", "--memory-per-model", "740")
    out = aws.run("deploy", *options, *size)
    assert re.search(r"ml\.m5\.large .* 7 +too small", out)
    assert re.search(r"ml\.r5\.large .*<- chosen", out)
    assert "1 x ml.r5.large" in out
    assert "us-east-1 prices of 2025-08; prices change" in out
    said = aws.run("deploy", *options, *size, "--budget", "0.15", code=2)
    assert "nothing under $0.15 an hour holds 8 models; ml.r5.large does for $0.151" in said
    limits = ("--max-instances", "2", "--invocations", "9")
    out = aws.run("deploy", *options, *limits, "--budget", "0.25")
    assert re.search(r"ml\.t2\.medium .*burstable", out)
    assert "1 x ml.c5.large, up to $0.204 when scaled to 2" in out
    said = aws.run("deploy", *options, "--env", "ENGINE_PRECISION=int4", code=2)
    assert said.startswith("--env: ENGINE_PRECISION is 'int4', must be one of")


@pytest.mark.parametrize(
    "size", [("--instance-type", "ml.m5.large"), ("--serverless-memory", "4096")]
)
@pytest.mark.parametrize(
    "limit", [("--budget", "0.01"), ("--models-in-memory", "8"), ("--memory-per-model", "700")]
)
def test_what_picks_an_instance_is_refused_beside_one(
    ready: Cloud, size: tuple[str, str], limit: tuple[str, str]
) -> None:
    said = ready.run("deploy", "poems", "--models", MODELS, "--dry-run", *size, *limit, code=2)
    assert said.startswith(f"{limit[0]} picks the instance type: leave out {limit[0]} or {size[0]}")


@pytest.fixture
def price_list() -> Iterator[str]:
    """AWS's Pricing API, of two instances of which one is not in our file."""

    def product(name: str, usd: str) -> str:
        price = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
        terms = {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": price}}}}
        return json.dumps({"product": {"attributes": {"instanceName": name}}, "terms": terms})

    prices = [product("ml.m5.large", "0.141"), product("ml.new.large", "0.01")]
    found = json.dumps({"FormatVersion": "aws_v1", "PriceList": prices}).encode()
    with upstreams(1) as [server]:
        server.act = lambda handler: handler.answer(200, found)
        yield f"http://127.0.0.1:{server.port}"


def test_prices_are_those_of_the_pricing_api_where_it_answers(
    ready: Cloud, price_list: str
) -> None:
    out = ready.run(
        "deploy", "poems", "--models", MODELS, "--yes", AWS_ENDPOINT_URL_PRICING=price_list
    )
    assert re.search(r"ml\.m5\.large .*0\.141.*<- chosen", out)
    assert "ml.r5.large" not in out
    assert "$0.141 an hour for 1 x ml.m5.large (us-east-1, the Pricing API)" in out


def test_wrong_surroundings_are_named_before_anything_is_made(ready: Cloud) -> None:
    options = ("--instance-type", "ml.m5.large", "--yes")
    cases = [
        (("--models", "s3://nowhere/x/"), "there is no bucket nowhere"),
        (("--models", "s3://fine-tunes/empty"), "no *.tar.gz at s3://fine-tunes/empty/"),
        (("--models", MODELS, "--region", "eu-west-1"),
         "bucket fine-tunes is in us-east-1, the command's region is eu-west-1"),
        (("--models", MODELS, "--image", "kogpt2-serving:cpu"), "is not in ECR"),
        (("--models", "시인들"), "시인들 must be s3://bucket/prefix/"),
    ]  # fmt: skip
    for given, expected in cases:
        assert expected in ready.run("deploy", "poems", *given, *options, code=2)
    assert ready.changes() == []


def test_a_stack_of_another_template_is_left_alone(ready: Cloud) -> None:
    other = '{"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}}'
    ready.client("cloudformation").create_stack(StackName="poems", TemplateBody=other)
    assert "of another template" in ready.run("deploy", *BASIC, code=2)
    assert "was not created by kogpt2 deploy" in ready.run("teardown", "poems", "--yes", code=2)
    assert ready.stack("poems").status == "CREATE_COMPLETE"
    assert "0 deployments" in ready.run("status")


def test_the_newest_image_for_the_instances_is_taken(ready: Cloud) -> None:
    said = ready.run("deploy", *ON_GPU, code=2)
    assert "no image with a tag gpu-... in ECR's repository kogpt2-serving" in said
    newest = ready.put_image("cpu-v2")
    for_gpus = ready.put_image("gpu-v2")
    ready.put_image("v3")
    ready.run("deploy", *BASIC)
    assert ready.endpoint("poems")["model"]["PrimaryContainer"]["Image"] == newest
    ready.run("deploy", *ON_GPU)
    assert ready.endpoint("odes")["model"]["PrimaryContainer"]["Image"] == for_gpus
    old = newest.partition("@")[0] + ":cpu-v1"
    ready.run("deploy", *BASIC, "--image", old)
    (v1,) = ready.client("ecr").describe_images(
        repositoryName="kogpt2-serving", imageIds=[{"imageTag": "cpu-v1"}]
    )["imageDetails"]
    assert parameters(ready)["Image"].endswith(f"/kogpt2-serving@{v1['imageDigest']}")
    said = ready.run("deploy", *BASIC, "--image", old.replace(":cpu-v1", ":v9"), code=2)
    assert said.endswith(":v9: kogpt2 push puts it there")


def test_graviton_instances_take_images_for_arm64_alone(ready: Cloud) -> None:
    on_graviton = (*BASIC[:3], "--instance-type", "ml.c7g.xlarge", "--yes")
    said = ready.run("deploy", *on_graviton, code=2)
    assert "no image with a tag arm64-... in ECR's repository kogpt2-serving" in said
    assert said.endswith("Graviton runs what scripts/build slim --platform linux/arm64 makes")
    arm, x86 = ready.put_image("arm64-v1"), ready.put_image("cpu-v2")
    ready.run("deploy", *on_graviton)
    assert ready.endpoint("poems")["model"]["PrimaryContainer"]["Image"] == arm
    said = ready.run("deploy", *on_graviton, "--image", x86, code=2)
    assert "is for x86-64, which Graviton instances do not run" in said
    said = ready.run("deploy", *BASIC, "--image", arm, code=2)
    assert said.endswith("is for arm64: give a Graviton --instance-type, such as ml.m6g.large")
    said = ready.run("deploy", *on_graviton, "--env", "ENGINE_BACKEND=mxnet", code=2)
    assert said == "there is no MXNet for arm64: take x86-64 instances or ENGINE_BACKEND=native"


def test_the_cheapest_instance_is_one_that_runs_the_image(ready: Cloud) -> None:
    tagged = ready.put_image("arm64-v1").partition("@")[0] + ":arm64-v1"
    out = ready.run("deploy", *BASIC[:3], "--dry-run", "--image", tagged)
    assert re.search(r"ml\.c7g\.large .*<- chosen", out)
    assert "ml.m5.large" not in out
    assert "ml.m6g.large" not in ready.run("deploy", *BASIC[:3], "--dry-run")


def test_another_serving_image_with_its_own_model(ready: Cloud) -> None:
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/huggingface-pytorch-tgi-inference:2.7"
    ready.run("deploy", "llm", "--image", image, "--env", "HF_MODEL_ID=skt/kogpt2-base-v2",
              "--instance-type", "ml.g5.xlarge", "--yes")  # fmt: skip
    container = ready.endpoint("llm")["model"]["PrimaryContainer"]
    assert (container["Image"], container["Mode"]) == (image, "SingleModel")
    assert "ModelDataUrl" not in container
