"""What a deployment consists of: the calls' parameters, made from the options. Touches no AWS.

Models and endpoint configurations cannot be changed, so their names carry a hash of what is in
them: the same options give the same names, and a run finds what an earlier one made.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from scripts.aws import instances, locations
from scripts.aws.account import TAG, Tags
from scripts.aws.deploy_options import Deploy
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


def build(options: Deploy, image: str, role_arn: str, instance: str | None) -> Deployment:
    """`instance` is None for a serverless endpoint."""
    tags = {**dict(options.tag), TAG: options.name}
    model = _model(options, image, role_arn)
    model = {"ModelName": hashed(options.name, model), **model}
    variant = _variant(options, model["ModelName"], instance)
    configuration: dict[str, Any] = {"ProductionVariants": [variant]}
    if options.async_output:
        configuration["AsyncInferenceConfig"] = _async(options)
    if options.data_capture:
        configuration["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": options.data_capture_percent,
            "DestinationS3Uri": str(locations.parse(options.data_capture)),
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
            "CaptureContentTypeHeader": {"JsonContentTypes": ["application/json"]},
        }
    if options.kms_key:
        configuration["KmsKeyId"] = options.kms_key
    configuration = {"EndpointConfigName": hashed(options.name, configuration), **configuration}
    scaling = policy = None
    if options.autoscale:
        lowest, highest, target = options.autoscale
        scaling = {**scalable(options.name), "MinCapacity": lowest, "MaxCapacity": highest}
        policy = {
            **scalable(options.name),
            "PolicyName": POLICY,
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": _tracking(options, target),
        }
    return Deployment(options.name, model, configuration, scaling, policy, tags)


def _model(options: Deploy, image: str, role_arn: str) -> dict[str, Any]:
    container: dict[str, Any] = {"Image": image}
    if options.models:
        container["Mode"] = "MultiModel"
        container["ModelDataUrl"] = str(locations.parse(options.models))
        container["MultiModelConfig"] = {"ModelCacheSetting": options.model_cache}
    elif options.model:
        container["ModelDataUrl"] = options.model
    if options.env:
        container["Environment"] = dict(options.env)
    model: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": role_arn}
    if options.subnets:
        model["VpcConfig"] = {
            "Subnets": options.subnets,
            "SecurityGroupIds": options.security_groups,
        }
    return model


def _variant(options: Deploy, model: str, instance: str | None) -> dict[str, Any]:
    variant: dict[str, Any] = {"VariantName": VARIANT, "ModelName": model}
    if options.serverless:
        memory, concurrency = options.serverless
        variant["ServerlessConfig"] = {"MemorySizeInMB": memory, "MaxConcurrency": concurrency}
        return variant
    first = max(1, options.autoscale[0]) if options.autoscale else options.instances
    variant.update(InstanceType=instance, InitialInstanceCount=first, InitialVariantWeight=1.0)
    if options.startup_timeout:
        variant["ContainerStartupHealthCheckTimeoutInSeconds"] = options.startup_timeout
        variant["ModelDataDownloadTimeoutInSeconds"] = options.startup_timeout
    if options.ami:
        variant["InferenceAmiVersion"] = options.ami
    return variant


def _async(options: Deploy) -> dict[str, Any]:
    assert options.async_output
    output: dict[str, Any] = {"S3OutputPath": str(locations.parse(options.async_output))}
    if options.kms_key:
        output["KmsKeyId"] = options.kms_key
    topics = {"SuccessTopic": options.success_topic, "ErrorTopic": options.error_topic}
    if topics := {key: topic for key, topic in topics.items() if topic}:
        output["NotificationConfig"] = topics
    return {"OutputConfig": output}


def _tracking(options: Deploy, target: float) -> dict[str, Any]:
    """Calls per instance and minute; for an asynchronous endpoint, calls that wait per instance."""
    tracking: dict[str, Any] = {
        "TargetValue": target,
        "ScaleInCooldown": options.scale_in_cooldown,
        "ScaleOutCooldown": options.scale_out_cooldown,
    }
    if options.async_output:
        tracking["CustomizedMetricSpecification"] = {
            "MetricName": "ApproximateBacklogSizePerInstance",
            "Namespace": "AWS/SageMaker",
            "Dimensions": [{"Name": "EndpointName", "Value": options.name}],
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
