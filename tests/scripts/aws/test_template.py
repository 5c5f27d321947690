"""The template fits AWS's schemas, refuses what SageMaker does not serve, asks for few rights."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer
from moto.core import DEFAULT_ACCOUNT_ID

from command.errors import Problem
from scripts import cli
from scripts.aws.refusals import refuse, refuse_update
from scripts.aws.template import body, option_name, template, with_defaults
from scripts.deploy import Options
from tests.scripts.aws.cloud import REGION

pytestmark = pytest.mark.usefixtures("aws")  # fills gaps of moto's reading of templates

MANY = "x --models s3://b/p/"
ONE = "x --model s3://b/p/m.tar.gz"
IMAGE = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/team/kogpt2-serving:v1"
TRITON = f"785573368785.dkr.ecr.{REGION}.amazonaws.com/sagemaker-tritonserver:24.01-py3"
TOPIC = f"arn:aws:sns:{REGION}:123456789012:done"
KEY = f"arn:aws:kms:{REGION}:123456789012:key/1"


def asked(line: str) -> dict[str, str]:
    """The parameters of a command line."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    found = group.commands["deploy"].make_context("deploy", shlex.split(line)).params
    options = Options(**found)
    named = {name: getattr(options, option_name(name)) for name in template()["Parameters"]}
    given = {name: str(value) for name, value in named.items() if value is not None}
    return dict(with_defaults({"Image": IMAGE, **given}))


@pytest.mark.slow
def test_the_template_fits_the_schemas_of_aws() -> None:
    from cfnlint import ManualArgs  # two seconds, which each worker would take
    from cfnlint.api import lint

    config = ManualArgs(regions=[REGION])
    text = body({"ENGINE_BACKEND": "native", "시인": "김소월"})
    assert lint(text, config=config) == []
    group = {"Type": "AWS::Logs::LogGroup", "Properties": {"RetentionInDays": 31}}
    found = lint(json.dumps({"Resources": {"Logs": group}}), config=config)
    assert "E3030" in {match.rule.id for match in found}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (f"{MANY} --serverless-memory 2048", "host one model"),
        (f"{MANY} --async-output s3://b/o", "cannot name a TargetModel"),
        (f"{MANY} --model s3://b/m.tar.gz", "not both"),
        (f"{ONE} --model-cache Disabled", "goes with --models"),
        (f"{ONE} --serverless-memory 2048 --max-instances 2", "scale by themselves"),
        (f"{ONE} --serverless-memory 2048 --data-capture s3://b/c", "do not capture"),
        (f"{ONE} --serverless-memory 2048 --subnets a --security-groups b", "in a VPC"),
        (f"{ONE} --serverless-memory 2048 --async-output s3://b/o", "either serverless or"),
        (f"{ONE} --serverless-memory 2048 --instances 2", "no instances to choose"),
        (f"{ONE} --serverless-memory 2048 --startup-timeout 90", "no instances to choose"),
        (f"{ONE} --async-output s3://b/o --data-capture s3://b/c", "real-time"),
        (f"{ONE} --async-output s3://b/o --max-instances 2 --concurrency 5", "calls that wait"),
        (f"{ONE} --max-instances 2 --min-instances 0 --invocations 9", "only asynchronous"),
        (f"{ONE} --max-instances 2", "goes with --invocations or --concurrency"),
        (f"{ONE} --max-instances 2 --invocations 9 --concurrency 9", "not both"),
        (f"{ONE} --success-topic {TOPIC}", "go with --async-output"),
        (f"{ONE} --subnets a", "go together"),
        (f"{ONE} --security-groups a", "go together"),
        (f"{ONE} --monthly-budget 9", "goes with --alarm-email"),
        (f"{MANY} --instance-type ml.g4dn.xlarge", "NVIDIA Triton"),
        (f"{MANY} --instance-type ml.inf1.xlarge", "run on CPU"),
        (f"{ONE} --max-instances 2 --invocations 9 --instance-type ml.t2.large", "burstable"),
        (f"{ONE} --max-instances 2 --min-instances 3 --invocations 9", "must not be above"),
        (f"{ONE} --kms-key {KEY} --instance-type ml.g5.xlarge", "local disk"),
        (f"{ONE} --kms-key {KEY} --instance-type ml.m5d.xlarge", "local disk"),
    ],
)
def test_refused(options: str, reason: str) -> None:
    with pytest.raises(Problem, match=reason):
        refuse(asked(options))


@pytest.mark.parametrize(
    "options",
    [
        f"{MANY} --max-instances 3 --invocations 9 --data-capture s3://b/c/",
        f"{MANY} --image {TRITON} --instance-type ml.g4dn.xlarge",
        f"{ONE} --kms-key {KEY} --subnets subnet-1,subnet-2 --security-groups sg-1",
    ],
)
def test_served(options: str) -> None:
    refuse(asked(options))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (ONE, f"{ONE} --serverless-memory 2048", "cannot become serverless"),
        (f"{ONE} --max-instances 2 --invocations 9",
         f"{ONE} --max-instances 2 --invocations 9 --instance-type ml.m5.xlarge", "once without"),
    ],
)  # fmt: skip
def test_an_update_that_sagemaker_does_not_make(before: str, after: str, reason: str) -> None:
    refuse_update(asked(before), asked(before))
    with pytest.raises(Problem, match=reason):
        refuse_update(asked(before), asked(after))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("시 --models s3://b/p/", "letters, digits and -"),
        ("x", "give --models, --model or --image"),
        (f"x --image {IMAGE}", "give --instance-type"),
        (f"{MANY} --env A", "is not NAME=VALUE"),
        (f"{MANY} --instances many", "is not a valid int"),
    ],
)
def test_wrong_options(options: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["deploy", *shlex.split(options)]) == 2
    assert reason in capsys.readouterr().err


def rendered(options: str) -> dict[str, Any]:
    """The properties of the resources that there would be, by their names; none is refused."""
    from moto.cloudformation import parsing  # two seconds, which each worker would take
    from moto.cloudformation.models import Stack as StackOfMoto

    refuse(asked(options))
    document = StackOfMoto.parse_template(body({}))
    place = ("id", "poems", asked(options), {}, REGION, DEFAULT_ACCOUNT_ID, document, {})
    resources = parsing.ResourceMap(*place)
    resources.load()
    for name in document["Resources"]:
        resources._parsed_resources[name] = SimpleNamespace(
            physical_resource_id=name, get_cfn_attribute=f"{name}.{{}}".format
        )
    return {
        name: parsing.clean_json(resource["Properties"], resources)
        for name, resource in document["Resources"].items()
        if resources.lazy_condition_map.get("Condition" in resource and resource["Condition"], True)
    }


BASIC = {"ExecutionRole", "Logs", "ServedModel", "Configuration", "Endpoint"}


def test_what_is_not_asked_for_is_not_made() -> None:
    found = rendered(MANY)
    assert set(found) == BASIC
    container = found["ServedModel"]["PrimaryContainer"]
    assert container == {
        "Image": IMAGE,
        "Mode": "MultiModel",
        "ModelDataUrl": "s3://b/p/",
        "MultiModelConfig": {"ModelCacheSetting": "Enabled"},
        "Environment": {},
    }
    assert found["Configuration"] == {
        "ProductionVariants": [
            {"VariantName": "AllTraffic", "ModelName": "ServedModel.ModelName",
             "InitialVariantWeight": 1, "InstanceType": "ml.m5.large", "InitialInstanceCount": 1}
        ]
    }  # fmt: skip
    assert "ExecutionRole" not in rendered(f"{MANY} --role arn:aws:iam::123456789012:role/mine")


@pytest.mark.parametrize(
    ("options", "target", "metric"),
    [
        (f"{MANY} --max-instances 4 --invocations 200 --scale-in-cooldown 500", 200,
         "SageMakerVariantInvocationsPerInstance"),
        (f"{MANY} --max-instances 4 --concurrency 5", 5,
         "SageMakerVariantConcurrentRequestsPerModelHighResolution"),
        (f"{ONE} --async-output s3://b/o/ --max-instances 4 --min-instances 0 --invocations 3", 3,
         "ApproximateBacklogSizePerInstance"),
    ],
)  # fmt: skip
def test_instances_scale_by_what_is_asked_for(options: str, target: int, metric: str) -> None:
    found = rendered(options)
    assert found["Target"]["ResourceId"] == "endpoint/Endpoint.EndpointName/variant/AllTraffic"
    assert found["Target"]["MaxCapacity"] == 4
    assert found["Endpoint"]["RetainAllVariantProperties"] is True
    tracking = found["Tracking"]["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == target
    assert tracking["ScaleInCooldown"] == (500 if target == 200 else 300)
    (specification,) = (value for name, value in tracking.items() if "Metric" in name)
    assert metric in specification.values()
    woken = {"Wakening", "Waiting"} if "--min-instances 0" in options else set()
    assert set(found) == BASIC | {"Target", "Tracking"} | woken


def test_other_kinds_of_endpoint() -> None:
    serverless = rendered(f"{ONE} --serverless-memory 4096 --serverless-concurrency 5")
    (variant,) = serverless["Configuration"]["ProductionVariants"]
    assert variant.keys() == {
        "VariantName",
        "ModelName",
        "InitialVariantWeight",
        "ServerlessConfig",
    }
    assert variant["ServerlessConfig"] == {"MemorySizeInMB": 4096, "MaxConcurrency": 5}
    found = rendered(f"{ONE} --async-output s3://b/o/ --success-topic {TOPIC} --kms-key {KEY}")
    assert found["Configuration"]["AsyncInferenceConfig"]["OutputConfig"] == {
        "S3OutputPath": "s3://b/o/", "KmsKeyId": KEY,
        "NotificationConfig": {"SuccessTopic": TOPIC},
    }  # fmt: skip
    network = "--subnets subnet-1,subnet-2 --security-groups sg-1 --startup-timeout 900"
    found = rendered(f"{ONE} --data-capture s3://b/c/ --data-capture-percent 5 {network}")
    capture = found["Configuration"]["DataCaptureConfig"]
    assert (capture["InitialSamplingPercentage"], capture["DestinationS3Uri"]) == (5, "s3://b/c/")
    assert found["ServedModel"]["VpcConfig"] == {
        "Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"],
    }  # fmt: skip
    (variant,) = found["Configuration"]["ProductionVariants"]
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 900


def test_alarms_and_a_budget_go_to_whom_is_named() -> None:
    found = rendered(f"{MANY} --alarm-email 시인@example.com --latency-alarm 3 --monthly-budget 50")
    assert set(found) == BASIC | {"Alarms", "Errors", "Latency", "Budget"}
    assert found["Alarms"]["Subscription"][0]["Endpoint"] == "시인@example.com"
    assert float(found["Latency"]["Threshold"]) == 3_000_000
    assert found["Budget"]["Budget"]["BudgetLimit"] == {"Amount": 50, "Unit": "USD"}


def allowed(options: str) -> set[tuple[str, str]]:
    """(action, resource) of the role that is made."""
    (policy,) = rendered(options)["ExecutionRole"]["Policies"]
    pairs = set()
    for statement in policy["PolicyDocument"]["Statement"]:
        actions, places = statement["Action"], statement["Resource"]
        for action in actions if isinstance(actions, list) else [actions]:
            pairs |= {(action, one) for one in (places if isinstance(places, list) else [places])}
    return pairs


def test_the_role_may_do_what_it_must_and_no_more() -> None:
    least = allowed(f"x --image {IMAGE} --instance-type ml.m5.large")
    logs = f"arn:aws:logs:{REGION}:{DEFAULT_ACCOUNT_ID}:log-group:/aws/sagemaker/Endpoints/poems:*"
    image = f"arn:aws:ecr:{REGION}:123456789012:repository/team/kogpt2-serving"
    assert {place for _, place in least} == {"*", logs, image}
    assert {action for action, place in least if place == "*"} == {
        "cloudwatch:PutMetricData", "ecr:GetAuthorizationToken",
    }  # fmt: skip
    by_digest = f"x --image {IMAGE.rpartition(':')[0]}@sha256:0 --instance-type ml.m5.large"
    assert allowed(by_digest) == least
    for options, path in ((MANY, "p/*"), (ONE, "p/m.tar.gz")):
        more = {place for _, place in allowed(options) - least}
        assert more == {"arn:aws:s3:::b", f"arn:aws:s3:::b/{path}"}
    one = allowed(ONE)
    extra = allowed(f"{ONE} --async-output s3://b/o/ --success-topic {TOPIC} --kms-key {KEY}") - one
    assert extra >= {("sns:Publish", TOPIC), ("s3:PutObject", "arn:aws:s3:::b/o/*"),
                     ("kms:CreateGrant", KEY)}  # fmt: skip
    assert ("s3:PutObject", "arn:aws:s3:::b/c/*") in allowed(
        f"{ONE} --data-capture s3://b/c/"
    ) - one
    network = allowed(f"{ONE} --subnets a --security-groups b") - one
    assert {action.partition(":")[0] for action, _ in network} == {"ec2"}
