"""Checks parameters for what SageMaker refuses and the template's own rules cannot express.

Each rule names its page of the Amazon SageMaker AI Developer Guide, unless another is named.
"""

from __future__ import annotations

import re

from command.errors import Problem
from scripts.aws import template
from scripts.aws.instances import has_gpu
from scripts.aws.template import Values

SCALING = "Automatic scaling of Amazon SageMaker AI models"
MULTI_MODEL = "Supported algorithms, frameworks, and instances for multi-model endpoints"


def refuse(values: Values) -> None:
    """Raise `Problem` for the first rule of SageMaker that the parameters break."""
    template.refuse(values)
    many, scaled = values["Models"], values["MaxInstances"] != "0"
    instance = values["InstanceType"] if values["ServerlessMemory"] == "0" else ""
    triton = "triton" in values["Image"].lower()
    # Instances with NVMe disks, which their own hardware encrypts
    local_disk = re.match(r"ml\.([a-z]\d[a-z]*d[a-z]*|g\d\w*|p[45]\w*)\.", instance)
    rules = (
        (many and has_gpu(instance) and not triton,
         "multi-model endpoints on GPU instances are documented for NVIDIA Triton images only: take"
         " a CPU instance, or --model for a single-model endpoint on a GPU", MULTI_MODEL),
        (many and re.match(r"ml\.(inf|trn)", instance),
         "multi-model endpoints run on CPU instances, and with Triton on p2, p3, g4dn and g5",
         MULTI_MODEL),
        (scaled and instance.startswith("ml.t"),
         "burstable instances (ml.t2 and the like) cannot be auto-scaled", SCALING),
        (scaled and int(values["MinInstances"]) > int(values["MaxInstances"]),
         "--min-instances must not be above --max-instances", SCALING),
        (values["KmsKey"] and local_disk,
         "instances with a local disk encrypt it themselves and take no --kms-key",
         "API reference, CreateEndpointConfig"),
    )  # fmt: skip
    _first(rules)


def refuse_update(before: Values, after: Values) -> None:
    """Raise `Problem` if a stack cannot be updated from `before` to `after`."""
    scaled = before["MaxInstances"] != "0" and after["MaxInstances"] != "0"
    rules = (
        (before["ServerlessMemory"] == "0" != after["ServerlessMemory"],
         "an endpoint with instances cannot become serverless: choose another name, or tear it down"
         " first", "Deploy models with Amazon SageMaker Serverless Inference"),
        (scaled and before["InstanceType"] != after["InstanceType"],
         "the type of instances that scale cannot be changed: once without --max-instances, then"
         " with it", "Update endpoints that use automatic scaling"),
    )  # fmt: skip
    _first(rules)


def _first(rules: tuple[tuple[object, str, str], ...]) -> None:
    for applies, why, page in rules:
        if applies:
            raise Problem(f'{why} (AWS documentation: "{page}")')
