"""What can be asked of `kogpt2 deploy`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import typer

from scripts.aws.account import Asking
from scripts.aws.push import REPOSITORY
from scripts.options import argument, option, pair

SAFE = "Network and encryption"
_size = partial(option, rich_help_panel="Instances")
_scale = partial(option, rich_help_panel="Auto-scaling")
_kind = partial(option, rich_help_panel="Other kinds of endpoint")
_safe = partial(option, rich_help_panel=SAFE)


def counted(pattern: str, shape: str) -> Any:
    """A converter of an option's numbers that are parted by colons."""

    def convert(text: str) -> tuple[int, ...]:
        if not re.fullmatch(pattern, text):
            raise typer.BadParameter(f"{text} is not {shape}")
        return tuple(int(part) for part in text.split(":"))

    return convert


def listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


@dataclass(kw_only=True)
class Deploy(Asking):
    name: str = argument("of the endpoint: letters, digits and -, at most 30")
    image: str | None = option(None, f"(the newest in the ECR repository {REPOSITORY})")
    models: str | None = option(None, "a multi-model endpoint", metavar="s3://BUCKET/PREFIX/")
    model: str | None = option(None, "a single-model endpoint", metavar="s3://.../NAME.tar.gz")
    model_cache: Literal["Enabled", "Disabled"] = option("Enabled", "of a multi-model endpoint")
    env: list[tuple[str, str]] = option([], "repeatable", metavar="NAME=VALUE", parser=pair)
    role: str | None = option(None, "name or ARN of the role that SageMaker takes on")
    create_role: bool = option(False, "make one that may do what is needed, no more")
    tag: list[tuple[str, str]] = option([], "repeatable", metavar="NAME=VALUE", parser=pair)
    startup_timeout: int | None = option(None, "60 to 3600, for slow containers", metavar="S")

    instance_type: str | None = _size(None, "(the cheapest that holds the models)")
    instances: int = _size(1, "so many")
    ami: str | None = _size(None, "InferenceAmiVersion, for a GPU's driver", metavar="VERSION")
    models_in_memory: int | None = _size(None, "at a time (all)", metavar="N")
    budget: float | None = _size(None, "an hour, at most", metavar="USD")
    memory_per_model: int | None = _size(None, "(from artifact sizes)", metavar="MIB")

    autoscale: tuple[int, ...] | None = _scale(
        None,
        "TARGET calls per instance and minute; with --async calls that wait per instance",
        parser=counted(r"\d+:\d+:\d+", "MIN:MAX:TARGET"),
        metavar="MIN:MAX:TARGET",
    )
    scale_in_cooldown: int = _scale(300, "seconds", metavar="S")
    scale_out_cooldown: int = _scale(60, "seconds", metavar="S")

    serverless: tuple[int, ...] | None = _kind(
        None,
        "no instances",
        parser=counted(r"\d+:\d+", "MEMORY_MB:CONCURRENCY"),
        metavar="MEMORY_MB:CONCURRENCY",
    )
    async_output: str | None = _kind(None, "asynchronous", "--async", metavar="s3://OUTPUT/")
    success_topic: str | None = _kind(None, "SNS, with --async", metavar="ARN")
    error_topic: str | None = _kind(None, "SNS, with --async", metavar="ARN")
    data_capture: str | None = _kind(None, "keep requests and answers", metavar="s3://OUTPUT/")
    data_capture_percent: int = _kind(100, "of them", metavar="N")

    subnets: list[str] = option(
        "", "with --security-groups", parser=listed, metavar="ID,...", rich_help_panel=SAFE
    )
    security_groups: list[str] = option(
        "", "with --subnets", parser=listed, metavar="ID,...", rich_help_panel=SAFE
    )
    kms_key: str | None = _safe(None, "for the instances' disks and asynchronous answers")


def mistake(options: Deploy) -> str | None:
    """What is wrong with the options alone."""
    memory, concurrency = options.serverless or (1024, 1)
    rules = (
        (not re.fullmatch("[A-Za-z0-9](-*[A-Za-z0-9]){0,29}", options.name),
         "the name has letters, digits and -, at most 30"),
        (options.models and options.model, "give --models or --model, not both"),
        (not (options.models or options.model or options.image),
         "give --models, --model or --image"),
        (bool(options.role) == options.create_role, "give --role or --create-role"),
        (bool(options.subnets) != bool(options.security_groups),
         "--subnets and --security-groups go together"),
        ((options.success_topic or options.error_topic) and not options.async_output,
         "--success-topic and --error-topic go with --async"),
        (options.model_cache == "Disabled" and not options.models,
         "--model-cache goes with --models"),
        (options.instances < 1, "--instances must be at least 1"),
        (options.models_in_memory is not None and options.models_in_memory < 1,
         "--models-in-memory must be at least 1"),
        (not 1 <= options.data_capture_percent <= 100, "--data-capture-percent is 1 to 100"),
        (options.startup_timeout and not 60 <= options.startup_timeout <= 3600,
         "--startup-timeout is 60 to 3600 seconds"),
        (memory not in range(1024, 6145, 1024) or not 1 <= concurrency <= 200,
         "--serverless: memory is 1024, 2048 ... 6144 MB, concurrency 1 to 200"),
        (options.autoscale and (options.autoscale[0] > options.autoscale[1]
                             or options.autoscale[1] < 1 or options.autoscale[2] < 1),
         "--autoscale: MIN must not be above MAX, and TARGET is at least 1"),
        (not (options.models or options.model or options.instance_type or options.serverless),
         "without --models and --model, give --instance-type"),
    )  # fmt: skip
    return next((text for wrong, text in rules if wrong), None)
