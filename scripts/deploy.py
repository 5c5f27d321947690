"""`kogpt2 deploy`: creates or updates an endpoint as one CloudFormation stack."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, make_dataclass
from typing import Any

from command.errors import Failed, Problem
from command.options import argument, option, pair
from common.errors import SettingError
from common.settings import read_settings
from scripts.aws import instances, locations
from scripts.aws.account import TAG, Account, Change, confirm
from scripts.aws.instances import Prices
from scripts.aws.locations import Artifact, Location
from scripts.aws.memory import Needs, all_needs, text_model
from scripts.aws.refusals import refuse, refuse_update
from scripts.aws.stack import Stack
from scripts.aws.template import body, option_name, template, with_defaults
from scripts.push import ARM, CPU, GPU, REPOSITORY, in_ecr

PROMPT, TOKENS = "안녕하세요", 16  # of the test call after the deployment
BUCKETS = {"Models", "Model", "AsyncOutput", "DataCapture"}  # parameters that name a place in S3


@dataclass(kw_only=True)
class Deploy(Change):
    """Options that are not parameters of the template, which `Options` adds."""

    name: str = argument("the endpoint: letters, digits and -, at most 63")
    env: list[tuple[str, str]] = option(
        [], "a container's environment variable; repeatable", metavar="NAME=VALUE", parser=pair
    )
    tag: list[tuple[str, str]] = option(
        [], "an AWS tag; repeatable", metavar="NAME=VALUE", parser=pair
    )
    models_in_memory: int | None = option(None, "models loaded at a time (all)", metavar="N", min=1)
    memory_per_model: int | None = option(
        None, "weights in memory (what the engine counts)", metavar="MIB", min=1
    )
    budget: float | None = option(None, "most that the instances may cost an hour", metavar="USD")


def _options() -> Any:
    slots = template()["Parameters"]
    fields = []
    for group in template()["Metadata"]["AWS::CloudFormation::Interface"]["ParameterGroups"]:
        for name in group["Parameters"]:
            default = slots[name].get("Default")
            help_text = slots[name]["Description"] + (f" ({default})" if default else "")
            panel = group["Label"]["default"]
            kind = int | None if slots[name]["Type"] == "Number" else str | None
            fields.append((option_name(name), kind, option(None, help_text, rich_help_panel=panel)))
    return make_dataclass("Options", fields, bases=(Deploy,), kw_only=True)


Options = _options()


def run(options: Deploy) -> None:
    """Create an endpoint, or update the one of this name.

    It is one CloudFormation stack, deploy/sagemaker/endpoint.yaml, with an option for each
    parameter. Shows the changes and their cost, asks, and makes them; without a yes, a new stack
    stays, without resources, for the next run or `kogpt2 teardown`. The same command again
    changes nothing; with other options it updates the endpoint, which keeps answering. In the end
    one model is called. `kogpt2 teardown NAME` removes everything.

    Give --models (many fine-tunes behind one endpoint), --model (one), or neither for an --image
    with a model of its own, such as a Hugging Face LLM container set by --env.

    Examples:
    kogpt2 deploy poems --models s3://my-bucket/fine-tunes/ --budget 0.50
    kogpt2 deploy poems --models s3://my-bucket/fine-tunes/ --instance-type ml.m5.xlarge \\
        --max-instances 4 --invocations 200 --env ENGINE_BACKEND=native
    kogpt2 deploy poems --models s3://my-bucket/fine-tunes/ --instance-type ml.c7g.xlarge
    kogpt2 deploy one --model s3://my-bucket/fine-tunes/poems.tar.gz --serverless-memory 4096
    kogpt2 deploy llm --image URI --env HF_MODEL_ID=... --instance-type ml.g5.xlarge
    """
    named = {name: getattr(options, option_name(name)) for name in template()["Parameters"]}
    given = {name: str(value) for name, value in named.items() if value is not None}
    if not re.fullmatch("[A-Za-z](-*[A-Za-z0-9]){0,62}", options.name):
        raise Problem("the name has letters, digits and -, a letter first, at most 63")
    if not given.keys() & {"Models", "Model", "Image"}:
        raise Problem("give --models, --model or --image")
    if not given.keys() & {"Models", "Model", "InstanceType", "ServerlessMemory"}:
        raise Problem("without --models and --model, give --instance-type")
    for chosen in sorted(given.keys() & {"InstanceType", "ServerlessMemory"}):
        for limit in ("budget", "models_in_memory", "memory_per_model"):
            if getattr(options, limit) is not None:
                size, what = option_name(chosen).replace("_", "-"), limit.replace("_", "-")
                raise Problem(f"--{what} picks the instance type: leave out --{what} or --{size}")
    refuse(with_defaults(given))
    account = Account(options)
    given |= {key: str(locations.parse(given[key])) for key in BUCKETS if given.get(key)}
    for key in BUCKETS & given.keys():
        locations.check_bucket(account, locations.parse(given[key]))
    kind = wanted_kind(given)
    if kind == ARM and dict(options.env).get("ENGINE_BACKEND") == "mxnet":
        raise Problem("there is no MXNet for arm64: take x86-64 instances or ENGINE_BACKEND=native")
    given["Image"] = resolve_image(account, given.get("Image"), kind)
    stack, prices = Stack(account, options.name), instances.prices(account)
    if stack.description and not (stack.is_new or is_ours(stack.description)):
        raise Problem(f"there is a stack {options.name} of another template: choose another name")
    models: list[Artifact] = []
    if given.keys() & {"Models", "Model"}:
        place = locations.parse(given.get("Models") or given["Model"])
        models = locations.artifacts(account, place)
        if not models:
            raise Problem(f"no *.tar.gz at {place}: kogpt2 upload puts models there")
        if not given.keys() & {"InstanceType", "ServerlessMemory"}:
            given["InstanceType"] = pick(
                options, with_defaults(given), account, place, models, kind == ARM, prices
            )
    values = dict(with_defaults(given))
    stack.wait_for_others()
    if stack.values:
        refuse_update(stack.values, values)
    plan = stack.plan(body(dict(options.env)), values, {**dict(options.tag), TAG: options.name})
    if plan is None:
        print(f"{options.name} is up to date: nothing to change")
        return
    show(options, account, plan)
    print(f"  costs {prices.cost(values)}")
    with contextlib.ExitStack() as otherwise:  # also on Ctrl-C and without a terminal
        otherwise.callback(stack.drop, plan)
        if options.dry_run or not confirm(options, "Go on?"):
            return
        otherwise.pop_all()
    stack.carry_out(plan)
    print(f"{options.name} is in service; it costs {prices.cost(values)}")
    print(f"remove it with: kogpt2 teardown {options.name} --region {account.region}")
    if models and not values["AsyncOutput"]:  # calls of asynchronous endpoints take files in S3
        call_once(options, account, place, models)


run.__annotations__["options"] = Options


def is_ours(stack: dict[str, Any]) -> bool:
    """Return whether a stack was created from the template of `kogpt2 deploy`."""
    return bool(stack.get("Description") == template()["Description"])


def show(options: Deploy, account: Account, plan: dict[str, Any]) -> None:
    print(f"{options.name} in {account.region}, account {account.id}:")
    for change in (item["ResourceChange"] for item in plan["Changes"]):
        again = " (replaced)" if change.get("Replacement") == "True" else ""
        kind = change["ResourceType"].removeprefix("AWS::")
        print(f"  {change['Action'].lower():<7} {change['LogicalResourceId']}, {kind}{again}")


def call_once(options: Deploy, account: Account, place: Location, models: list[Artifact]) -> None:
    """Send a prompt to a text model and print the answer. Raises `Failed`, with the next step."""
    from scripts import invoke

    model = text_model(account, place, models)
    if model is None:
        print("no model was called: none is seen to answer prompts; kogpt2 invoke calls one")
        return
    print(f"a call of {model.name or place}: {PROMPT}", flush=True)
    call = invoke.Invoke(
        endpoint=options.name, region=account.region, profile=options.profile, timeout=70.0,
        wait=360.0, model=model.name or None, text=PROMPT, max_new_tokens=TOKENS,
    )  # fmt: skip
    try:
        invoke.run(call)
    except Failed as error:
        raise Failed(
            f"{options.name} is in service, but a call failed: {error}. Its logs: kogpt2 logs"
            f" {options.name} --since 15m --region {account.region}"
        ) from None


def pick(
    options: Deploy,
    values: Any,
    account: Account,
    place: Location,
    models: list[Artifact],
    arm: bool,
    prices: Prices,
) -> str:
    """Return the cheapest instance type that holds the models. Raises `Problem`."""
    from engine import backends
    from engine.artifacts.config import KOGPT2
    from engine.settings import Settings

    wanted = options.models_in_memory or len(models)
    try:
        settings = read_settings(Settings, dict(options.env))
    except SettingError as error:
        raise Problem(f"--env: {error.message}") from None
    precision = settings.precision or backends.precisions(settings.backend, "cpu")[0]
    if options.memory_per_model:
        weights = options.memory_per_model * instances.MIB
        model = Needs(weights, backends.row_bytes(KOGPT2, precision))
    else:
        model = instances.typical(all_needs(account, place, models, precision), wanted)
    return instances.choose(model, settings, wanted, values, options.budget, arm, prices)


def wanted_kind(given: dict[str, str]) -> str:
    """Return the tag prefix of images for the instance type or, without one, the image's own."""
    instance, image = given.get("InstanceType", ""), given.get("Image", "")
    if instances.has_gpu(instance):
        return GPU
    arm = instances.is_arm(instance) if instance else f":{ARM}" in image
    return ARM if arm else CPU


def resolve_image(account: Account, image: str | None, kind: str) -> str:
    """Return the image by its digest if it is in this account's ECR.

    The default is the newest image that `kogpt2 push` has tagged with this kind. Raises `Problem`
    if there is none, or if the tags say that the image is for other processors.
    """
    arm = kind == ARM
    if image is None:
        tagged = {"repositoryName": REPOSITORY, "filter": {"tagStatus": "TAGGED"}}
        result = account.find("ecr", "describe_repositories", repositoryNames=[REPOSITORY])
        images = result and account.all("ecr", "describe_images", "imageDetails", **tagged)
        images = [i for i in images or () if any(t.startswith(kind) for t in i["imageTags"])]
        if not images:
            graviton = "; Graviton runs what scripts/build slim --platform linux/arm64 makes"
            raise Problem(
                f"no image with a tag {kind}... in ECR's repository {REPOSITORY}: kogpt2 push"
                f" without --tag puts one there, or give --image{graviton if arm else ''}"
            )
        newest = max(images, key=lambda item: item["imagePushedAt"])
        return f"{result['repositories'][0]['repositoryUri']}@{newest['imageDigest']}"
    match = re.match(r"(\d+)\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com[^/]*/([^:@]+)(.*)$", image)
    if match is None:
        raise Problem(f"{image} is not in ECR, from which SageMaker takes images: kogpt2 push it")
    owner, region, name, version = match.groups()
    if region != account.region:
        raise Problem(
            f"{image} is in {region}, the endpoint would be in {account.region}: push there"
        )
    if owner != account.id:
        return image  # another account's, such as AWS's own containers: no permission to read
    key = "imageDigest" if version.startswith("@") else "imageTag"
    details = in_ecr(account, name, **{key: version[1:] or "latest"})
    if details is None:
        raise Problem(f"ECR has no {image}: kogpt2 push puts it there")
    tags = details.get("imageTags", ())
    if arm and any(tag.startswith((CPU, GPU)) for tag in tags):
        raise Problem(
            f"{image} is for x86-64, which Graviton instances do not run: push the one that"
            " scripts/build slim --platform linux/arm64 makes"
        )
    if not arm and any(tag.startswith(ARM) for tag in tags):
        raise Problem(
            f"{image} is for arm64: give a Graviton --instance-type, such as ml.m6g.large"
        )
    return f"{image[: len(image) - len(version)]}@{details['imageDigest']}"
