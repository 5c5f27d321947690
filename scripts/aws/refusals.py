"""Combinations of options that SageMaker does not serve, each with its reason and its page.

Pages are of the Amazon SageMaker AI Developer Guide unless another work is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from scripts.aws.deploy_options import Deploy
from scripts.lib.problem import Problem

SERVERLESS = "Deploy models with Amazon SageMaker Serverless Inference, Feature exclusions"
MULTI_MODEL = "Supported algorithms, frameworks, and instances for multi-model endpoints"
ASYNC = "Asynchronous inference"
SCALING = "Automatic scaling of Amazon SageMaker AI models"
CONFIG = "API reference, CreateEndpointConfig"


@dataclass(frozen=True)
class Refusal:
    when: Callable[[Deploy], object]
    why: str
    page: str


def is_gpu(instance: str | None) -> bool:
    return bool(re.match(r"ml\.(p\d|g\d|gr\d)", instance or ""))


def is_triton(image: str | None) -> bool:
    """Whether it is NVIDIA Triton, the one server with documented multi-model support on GPUs."""
    return "triton" in (image or "").lower()


def has_local_disk(instance: str | None) -> bool:
    """Whether its disk is encrypted by its own hardware: NVMe in the instance."""
    return bool(re.match(r"ml\.([a-z]\d[a-z]*d[a-z]*|g\d\w*|p4\w*|p5\w*)\.", instance or ""))


REFUSALS = (
    Refusal(
        lambda o: o.serverless and o.models,
        "serverless endpoints host one model: take --model, or instances",
        SERVERLESS,
    ),
    Refusal(
        lambda o: o.serverless and o.subnets,
        "serverless endpoints cannot be in a VPC",
        SERVERLESS,
    ),
    Refusal(
        lambda o: o.serverless and o.data_capture,
        "serverless endpoints do not capture data",
        SERVERLESS,
    ),
    Refusal(
        lambda o: o.serverless and (o.instance_type or o.budget or o.instances > 1),
        "serverless endpoints have no instances to choose",
        SERVERLESS,
    ),
    Refusal(
        lambda o: o.serverless and o.autoscale,
        "serverless endpoints scale by themselves, up to their concurrency; --autoscale scales"
        " instances",
        SERVERLESS,
    ),
    Refusal(
        lambda o: o.serverless and o.async_output,
        "one endpoint is either serverless or asynchronous",
        ASYNC,
    ),
    Refusal(
        lambda o: o.serverless and o.startup_timeout,
        "serverless endpoints have no start-up timeout to set",
        CONFIG,
    ),
    Refusal(
        lambda o: o.models and is_gpu(o.instance_type) and not is_triton(o.image),
        "multi-model endpoints on GPU instances are documented for NVIDIA Triton images only:"
        " take a CPU instance, or --model for a single-model endpoint on a GPU",
        MULTI_MODEL,
    ),
    Refusal(
        lambda o: o.models and re.match(r"ml\.(inf|trn)", o.instance_type or ""),
        "multi-model endpoints run on CPU instances, and with Triton on p2, p3, g4dn and g5",
        MULTI_MODEL,
    ),
    Refusal(
        lambda o: o.models and o.async_output,
        "an asynchronous call cannot name a TargetModel: take --model",
        "API reference, InvokeEndpointAsync",
    ),
    Refusal(
        lambda o: o.data_capture and o.async_output,
        "data capture is documented for real-time endpoints only",
        "Capture data from real-time endpoint",
    ),
    Refusal(
        lambda o: o.autoscale and (o.instance_type or "").startswith("ml.t"),
        "burstable instances (ml.t2 and the like) cannot be auto-scaled",
        SCALING,
    ),
    Refusal(
        lambda o: o.autoscale and o.autoscale[0] < 1 and not o.async_output,
        "only asynchronous endpoints scale to 0 instances",
        SCALING,
    ),
    Refusal(
        lambda o: o.kms_key and has_local_disk(o.instance_type),
        "instances with a local disk encrypt it themselves and take no --kms-key",
        CONFIG,
    ),
)


def refuse(options: Deploy) -> None:
    """Raises `Problem` for the first that applies."""
    for refusal in REFUSALS:
        if refusal.when(options):
            raise Problem(f'{refusal.why} (AWS documentation: "{refusal.page}")')
