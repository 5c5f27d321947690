"""An endpoint, made or brought up to what is asked."""

from __future__ import annotations

import time

from scripts.aws import deployment
from scripts.aws.account import Account
from scripts.aws.deploy_options import Deploy, mistake
from scripts.aws.refusals import refuse
from scripts.aws.report import phase
from scripts.aws.state import State
from scripts.aws.steps import Steps
from scripts.aws.wanted import examine
from scripts.lib.problem import Problem


def run(options: Deploy) -> None:
    """Makes an endpoint, or brings the one of this name up to what is asked.

    It shows what it is going to do and what that costs, asks, and does it. The same command again
    changes nothing; after an interruption it goes on; with other options it updates the endpoint,
    which answers all the while. `kogpt2 teardown NAME` removes everything.

    One of --models (many fine-tunes behind one endpoint), --model (one), or neither (an --image
    that brings its own, such as a Hugging Face LLM container that is told by --env).

    Examples:
    kogpt2 deploy poems --models s3://my-bucket/fine-tunes/ --create-role --budget 0.50
    kogpt2 deploy poems --models s3://my-bucket/fine-tunes/ --role my-role \\
        --instance-type ml.m5.xlarge --autoscale 1:4:200 --env ENGINE_BACKEND=onnxruntime
    kogpt2 deploy one --model s3://my-bucket/fine-tunes/poems.tar.gz --create-role \\
        --serverless 4096:5
    kogpt2 deploy llm --image URI --env HF_MODEL_ID=... --instance-type ml.g5.xlarge --role my-role
    """
    if wrong := mistake(options):
        raise Problem(wrong)
    refuse(options)
    account = Account(options)
    began = time.monotonic()
    with phase("checks") as step:
        wanted, role = examine(options, account)
        step.result = f"{role.found}; image {wanted.model['PrimaryContainer']['Image']}"
    state = State(account, wanted)
    changes = state.changes(role)
    print(f"{options.name} in {account.region}, account {account.id}:")
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
    print(f"{options.name} is in service after {time.monotonic() - began:.0f} s")
    print(f"costs {deployment.cost(wanted.variant, account.region, most=most)}")
    print(f"remove it with: kogpt2 teardown {options.name} --region {account.region}")
