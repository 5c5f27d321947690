"""Makes an endpoint, or brings the one of this name up to what is asked.

It shows what it is going to do and what that costs, asks, and does it. The same command again
changes nothing; after an interruption it goes on; with other options it updates the endpoint, which
answers all the while. scripts/teardown NAME removes everything.

One of --models (many fine-tunes behind one endpoint), --model (one), or neither (an --image that
brings its own, such as a Hugging Face LLM container that is told by --env).
"""

from __future__ import annotations

import argparse
import re
import time
from typing import Any

from scripts.aws import deployment
from scripts.aws.account import Account, can_be_dry, pair, parser
from scripts.aws.push import REPOSITORY
from scripts.aws.refusals import refuse
from scripts.aws.report import phase
from scripts.aws.state import State
from scripts.aws.steps import Steps
from scripts.aws.wanted import examine
from scripts.lib.problem import Problem

EXAMPLE = """examples:
  scripts/deploy poems --models s3://my-bucket/fine-tunes/ --create-role --budget 0.50
  scripts/deploy poems --models s3://my-bucket/fine-tunes/ --role my-role \\
      --instance-type ml.m5.xlarge --autoscale 1:4:200 --env ENGINE_BACKEND=onnxruntime
  scripts/deploy one --model s3://my-bucket/fine-tunes/poems.tar.gz --create-role \\
      --serverless 4096:5
  scripts/deploy llm --image URI --env HF_MODEL_ID=... --instance-type ml.g5.xlarge --role my-role
"""


def counted(pattern: str, shape: str) -> Any:
    """A converter of an option's numbers that are parted by colons."""

    def convert(text: str) -> tuple[int, ...]:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text} is not {shape}")
        return tuple(int(part) for part in text.split(":"))

    return convert


def listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = parser("deploy", __doc__, EXAMPLE)
    add = made.add_argument
    add("name", help="of the endpoint: letters, digits and -, at most 30")
    add("--image", help=f"(the newest in the ECR repository {REPOSITORY})")
    add("--models", metavar="s3://BUCKET/PREFIX/", help="a multi-model endpoint")
    add("--model", metavar="s3://.../NAME.tar.gz", help="a single-model endpoint")
    add("--model-cache", choices=("Enabled", "Disabled"), default="Enabled", help="(Enabled)")
    add("--env", action="append", type=pair, default=[], metavar="NAME=VALUE")
    add("--role", help="name or ARN of the role that SageMaker takes on")
    add("--create-role", action="store_true", help="make one that may do what is needed, no more")
    add("--tag", action="append", type=pair, default=[], metavar="NAME=VALUE")
    add("--startup-timeout", type=int, metavar="S", help="60 to 3600, for slow containers")
    can_be_dry(made)
    size = made.add_argument_group("instances")
    size.add_argument("--instance-type", help="(the cheapest that holds the models)")
    size.add_argument("--instances", type=int, default=1, help="(1)")
    size.add_argument("--ami", metavar="VERSION", help="InferenceAmiVersion, for a GPU's driver")
    size.add_argument("--models-in-memory", type=int, metavar="N", help="at a time (all)")
    size.add_argument("--budget", type=float, metavar="USD", help="an hour, at most")
    size.add_argument("--memory-per-model", type=int, metavar="MIB", help="(from artifact sizes)")
    scale = made.add_argument_group("auto-scaling")
    scale.add_argument(
        "--autoscale",
        type=counted(r"\d+:\d+:\d+", "MIN:MAX:TARGET"),
        metavar="MIN:MAX:TARGET",
        help="TARGET calls per instance and minute; with --async calls that wait per instance",
    )
    scale.add_argument("--scale-in-cooldown", type=int, default=300, metavar="S", help="(300)")
    scale.add_argument("--scale-out-cooldown", type=int, default=60, metavar="S", help="(60)")
    kind = made.add_argument_group("other kinds of endpoint")
    serverless = counted(r"\d+:\d+", "MEMORY_MB:CONCURRENCY")
    kind.add_argument("--serverless", type=serverless, metavar="MEMORY_MB:CONCURRENCY")
    kind.add_argument("--async", dest="async_output", metavar="s3://OUTPUT/", help="asynchronous")
    kind.add_argument("--success-topic", metavar="ARN", help="SNS, with --async")
    kind.add_argument("--error-topic", metavar="ARN", help="SNS, with --async")
    kind.add_argument("--data-capture", metavar="s3://OUTPUT/", help="keep requests and answers")
    kind.add_argument("--data-capture-percent", type=int, default=100, metavar="N", help="(100)")
    safe = made.add_argument_group("network and encryption")
    safe.add_argument("--subnets", type=listed, default=[], metavar="ID,...")
    safe.add_argument("--security-groups", type=listed, default=[], metavar="ID,...")
    safe.add_argument("--kms-key", help="for the instances' disks and asynchronous answers")
    args = made.parse_args(argv)
    if problem := mistake(args):
        made.error(problem)
    return args


def mistake(args: argparse.Namespace) -> str | None:
    """What is wrong with the options alone."""
    memory, concurrency = args.serverless or (1024, 1)
    rules = (
        (not re.fullmatch("[A-Za-z0-9](-*[A-Za-z0-9]){0,29}", args.name),
         "the name has letters, digits and -, at most 30"),
        (args.models and args.model, "give --models or --model, not both"),
        (not (args.models or args.model or args.image), "give --models, --model or --image"),
        (bool(args.role) == args.create_role, "give --role or --create-role"),
        (bool(args.subnets) != bool(args.security_groups),
         "--subnets and --security-groups go together"),
        ((args.success_topic or args.error_topic) and not args.async_output,
         "--success-topic and --error-topic go with --async"),
        (args.model_cache == "Disabled" and not args.models, "--model-cache goes with --models"),
        (args.instances < 1, "--instances must be at least 1"),
        (args.models_in_memory is not None and args.models_in_memory < 1,
         "--models-in-memory must be at least 1"),
        (not 1 <= args.data_capture_percent <= 100, "--data-capture-percent is 1 to 100"),
        (args.startup_timeout and not 60 <= args.startup_timeout <= 3600,
         "--startup-timeout is 60 to 3600 seconds"),
        (memory not in range(1024, 6145, 1024) or not 1 <= concurrency <= 200,
         "--serverless: memory is 1024, 2048 ... 6144 MB, concurrency 1 to 200"),
        (args.autoscale and (args.autoscale[0] > args.autoscale[1]
                             or args.autoscale[1] < 1 or args.autoscale[2] < 1),
         "--autoscale: MIN must not be above MAX, and TARGET is at least 1"),
        (not (args.models or args.model or args.instance_type or args.serverless),
         "without --models and --model, give --instance-type"),
    )  # fmt: skip
    return next((text for wrong, text in rules if wrong), None)


def run(args: argparse.Namespace) -> None:
    refuse(args)
    account = Account(args)
    began = time.monotonic()
    with phase("checks") as step:
        wanted, role = examine(args, account)
        step.result = f"{role.found}; image {wanted.model['PrimaryContainer']['Image']}"
    state = State(account, wanted)
    changes = state.changes(role)
    print(f"{args.name} in {account.region}, account {account.id}:")
    for change, what in changes:
        print(f"  {change:<7} {what}")
    most = wanted.scaling["MaxCapacity"] if wanted.scaling else None
    print(f"  cost    {deployment.cost(wanted.variant, account.region, most=most)}")
    if all(change == "keep" for change, _ in changes):
        print("nothing to change")
        return
    if not account.confirm("Go on?"):
        raise Problem("nothing changed")
    Steps(account, wanted, state).all(role)
    if account.dry_run:
        return
    print(f"{args.name} is in service after {time.monotonic() - began:.0f} s")
    print(f"costs {deployment.cost(wanted.variant, account.region, most=most)}")
    print(f"remove it with: scripts/teardown {args.name} --region {account.region}")
