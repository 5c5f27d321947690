"""What a deployment consists of: the calls' parameters, made from the options. Touches no AWS.

Models and endpoint configurations cannot be changed, so their names carry a hash of what is in
them: the same options give the same names, and a run finds what an earlier one made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from scripts.aws import instances, locations
from scripts.aws.account import TAG, Tags
from scripts.aws.resources import VARIANT, scalable

POLICY = "keep-the-target"


@dataclass(frozen=True)
class Deployment:
    name: str
    model: dict[str, Any]  # of create_model
    configuration: dict[str, Any]  # of create_endpoint_config
    scaling: dict[str, Any] | None  # of register_scalable_target
    policy: dict[str, Any] | None  # of put_scaling_policy
    tags: Tags

    @property
    def variant(self) -> dict[str, Any]:
        found: dict[str, Any] = self.configuration["ProductionVariants"][0]
        return found


def hashed(name: str, content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True).encode()
    return f"{name}-{hashlib.sha256(text).hexdigest()[:10]}"


def build(args: argparse.Namespace, image: str, role_arn: str, instance: str | None) -> Deployment:
    """`instance` is None for a serverless endpoint."""
    tags = {**dict(args.tag), TAG: args.name}
    model = _model(args, image, role_arn)
    model = {"ModelName": hashed(args.name, model), **model}
    variant = _variant(args, model["ModelName"], instance)
    configuration: dict[str, Any] = {"ProductionVariants": [variant]}
    if args.async_output:
        configuration["AsyncInferenceConfig"] = _async(args)
    if args.data_capture:
        configuration["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": args.data_capture_percent,
            "DestinationS3Uri": str(locations.parse(args.data_capture)),
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
            "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
        }
    if args.kms_key:
        configuration["KmsKeyId"] = args.kms_key
    configuration = {"EndpointConfigName": hashed(args.name, configuration), **configuration}
    scaling = policy = None
    if args.autoscale:
        lowest, highest, target = args.autoscale
        scaling = {**scalable(args.name), "MinCapacity": lowest, "MaxCapacity": highest}
        policy = {
            **scalable(args.name),
            "PolicyName": POLICY,
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": _tracking(args, target),
        }
    return Deployment(args.name, model, configuration, scaling, policy, tags)


def _model(args: argparse.Namespace, image: str, role_arn: str) -> dict[str, Any]:
    container: dict[str, Any] = {"Image": image}
    if args.models:
        container["Mode"] = "MultiModel"
        container["ModelDataUrl"] = str(locations.parse(args.models))
        container["MultiModelConfig"] = {"ModelCacheSetting": args.model_cache}
    elif args.model:
        container["ModelDataUrl"] = args.model
    if args.env:
        container["Environment"] = dict(args.env)
    model: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": role_arn}
    if args.subnets:
        model["VpcConfig"] = {"Subnets": args.subnets, "SecurityGroupIds": args.security_groups}
    return model


def _variant(args: argparse.Namespace, model: str, instance: str | None) -> dict[str, Any]:
    variant: dict[str, Any] = {"VariantName": VARIANT, "ModelName": model}
    if args.serverless:
        memory, concurrency = args.serverless
        variant["ServerlessConfig"] = {"MemorySizeInMB": memory, "MaxConcurrency": concurrency}
        return variant
    first = max(1, args.autoscale[0]) if args.autoscale else args.instances
    variant.update(InstanceType=instance, InitialInstanceCount=first, InitialVariantWeight=1.0)
    if args.startup_timeout:
        variant["ContainerStartupHealthCheckTimeoutInSeconds"] = args.startup_timeout
        variant["ModelDataDownloadTimeoutInSeconds"] = args.startup_timeout
    if args.ami:
        variant["InferenceAmiVersion"] = args.ami
    return variant


def _async(args: argparse.Namespace) -> dict[str, Any]:
    output: dict[str, Any] = {"S3OutputPath": str(locations.parse(args.async_output))}
    if args.kms_key:
        output["KmsKeyId"] = args.kms_key
    topics = {"SuccessTopic": args.success_topic, "ErrorTopic": args.error_topic}
    if topics := {key: topic for key, topic in topics.items() if topic}:
        output["NotificationConfig"] = topics
    return {"OutputConfig": output}


def _tracking(args: argparse.Namespace, target: float) -> dict[str, Any]:
    """Calls per instance and minute; for an asynchronous endpoint, calls that wait per instance."""
    tracking: dict[str, Any] = {
        "TargetValue": target,
        "ScaleInCooldown": args.scale_in_cooldown,
        "ScaleOutCooldown": args.scale_out_cooldown,
    }
    if args.async_output:
        tracking["CustomizedMetricSpecification"] = {
            "MetricName": "ApproximateBacklogSizePerInstance",
            "Namespace": "AWS/SageMaker",
            "Dimensions": [{"Name": "EndpointName", "Value": args.name}],
            "Statistic": "Average",
        }
    else:
        tracking["PredefinedMetricSpecification"] = {
            "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
        }
    return tracking


def hourly(variant: dict[str, Any], count: int | None = None) -> float | None:
    """What its instances cost, None where the price is not known here; serverless rests for 0."""
    if "ServerlessConfig" in variant:
        return 0.0
    instance = instances.known(variant["InstanceType"])
    many = variant["InitialInstanceCount"] if count is None else count
    return instance.usd_per_hour * many if instance else None


def cost(
    variant: dict[str, Any], region: str, count: int | None = None, most: int | None = None
) -> str:
    """The hourly cost in one sentence. `most` is where auto-scaling ends."""
    if "ServerlessConfig" in variant:
        gib = variant["ServerlessConfig"]["MemorySizeInMB"] / 1024
        second = gib * instances.data()["serverless_usd_per_gib_second"]
        rate = f"nothing while idle, ${second:.5f} for each second of a call"
        return f"{rate} ({instances.as_of(region)})"
    many = variant["InitialInstanceCount"] if count is None else count
    now = hourly(variant, many)
    what = f"{many} x {variant['InstanceType']}"
    if now is None:
        return f"{what}: its price is not known here, see {instances.data()['source']}"
    upper = hourly(variant, most) if most else None
    up_to = f", up to ${upper:.3f} when scaled to {most}" if upper else ""
    return f"${now:.3f} an hour for {what}{up_to} ({instances.as_of(region)})"
