"""`kogpt2 teardown`: removes a deployment."""

from __future__ import annotations

from dataclasses import dataclass

from command.errors import Problem
from command.options import argument
from scripts.aws import instances
from scripts.aws.account import Account, Change, confirm
from scripts.aws.stack import Stack
from scripts.aws.template import with_defaults
from scripts.deploy import BUCKETS, is_ours
from scripts.push import REPOSITORY


@dataclass(kw_only=True)
class Teardown(Change):
    name: str = argument("the deployment")


def run(options: Teardown) -> None:
    """Delete the stack that `kogpt2 deploy` created, and list what is not deleted.

    Shows the stack's resources and their cost, asks, and has CloudFormation delete them. Models in
    S3, the image's repository and captured data stay, because other deployments may use them.

    Examples:
    kogpt2 teardown poems --dry-run
    kogpt2 teardown poems
    kogpt2 teardown poems --yes
    """
    account = Account(options)
    stack = Stack(account, options.name)
    if stack.description is None:
        print(f"there is nothing of {options.name}")
        return
    if not (stack.is_new or is_ours(stack.description)):
        raise Problem(f"stack {options.name} was not created by kogpt2 deploy")
    resources = account.all(
        "cloudformation", "list_stack_resources", "StackResourceSummaries", StackName=options.name
    )
    listed = [resource for resource in resources if "PhysicalResourceId" in resource]
    for resource in listed:
        kind = resource["ResourceType"].removeprefix("AWS::")
        print(f"  {resource['LogicalResourceId']}, {kind}")
    values = with_defaults(stack.values)
    print(f"  they cost {instances.prices(account).cost(values)}")
    if options.dry_run:
        return
    if not confirm(options, f"Delete these {len(listed)}?"):
        raise Problem("nothing deleted")
    stack.wait_for_others()
    stack.delete()
    for key in sorted(BUCKETS):
        if values[key]:
            print(f"  not deleted: {values[key]} (aws s3 rm --recursive)")
    print(f"  not deleted: ECR's repository {REPOSITORY} (aws ecr delete-repository --force)")
    print(f"nothing else of {options.name} is left")
