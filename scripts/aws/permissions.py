"""The role that SageMaker takes on: what it must be allowed to do, and whether it is."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from scripts.aws import locations
from scripts.aws.account import TAG, Account, key_values, log_group
from scripts.aws.deploy_options import Deploy
from scripts.lib.problem import Problem

Needed = dict[str, list[str]]  # resource ARN -> actions on it

POLICY = "kogpt2-serving"
TRUST: dict[str, Any] = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ],
}
# What SageMaker does in a VPC and with a key on the role's behalf: the guide's page "How to use
# SageMaker AI execution roles", section "CreateModel API".
NETWORK = [
    "ec2:CreateNetworkInterface",
    "ec2:CreateNetworkInterfacePermission",
    "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeVpcs",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeSubnets",
    "ec2:DescribeSecurityGroups",
]


def needed(options: Deploy, account: Account, image: str) -> Needed:
    """What a deployment with these options asks of its role."""
    arn = account.arn
    found: Needed = defaultdict(list)
    found["*"] += ["cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"]
    found[arn("logs", f"log-group:{log_group(options.name)}:*", account.region, account.id)] += [
        "logs:CreateLogGroup",
        "logs:CreateLogStream",
        "logs:DescribeLogStreams",
        "logs:PutLogEvents",
    ]
    registry, _, rest = image.partition("/")
    if ".dkr.ecr." in registry:
        owner, _, _, region = registry.split(".")[:4]
        repository = rest.partition("@")[0].partition(":")[0]
        found[arn("ecr", f"repository/{repository}", region, owner)] += [
            "ecr:BatchCheckLayerAvailability",
            "ecr:BatchGetImage",
            "ecr:GetDownloadUrlForLayer",
        ]
    reads = [locations.parse(options.models)] if options.models else []
    reads += [locations.parse(options.model, prefix=False)] if options.model else []
    for location in reads:
        tail = "*" if options.models else ""
        found[arn("s3", f"{location.bucket}/{location.key}{tail}")].append("s3:GetObject")
        found[arn("s3", location.bucket)].append("s3:ListBucket")
    for text in (options.data_capture, options.async_output):
        if text:
            location = locations.parse(text)
            found[arn("s3", f"{location.bucket}/{location.key}*")].append("s3:PutObject")
            found[arn("s3", location.bucket)].append("s3:ListBucket")
    if (
        options.async_output
    ):  # requests lie in S3, too: beside the answers, as docs/sagemaker.md says
        location = locations.parse(options.async_output)
        found[arn("s3", f"{location.bucket}/{location.key}*")].append("s3:GetObject")
    for topic in filter(None, (options.success_topic, options.error_topic)):
        found[topic].append("sns:Publish")
    if options.subnets:
        found["*"] += NETWORK
    if options.kms_key and options.kms_key.startswith("arn:"):
        found[options.kms_key] += ["kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKey"]
    return {resource: list(dict.fromkeys(actions)) for resource, actions in found.items()}


def count(wanted: Needed) -> int:
    return sum(map(len, wanted.values()))


@dataclass(frozen=True)
class Role:
    """`change` is what has to be done with it: keep, make, or update what it may do."""

    name: str
    arn: str
    needed: Needed
    change: str
    found: str


def find(options: Deploy, account: Account, wanted: Needed) -> Role:
    """The role of a deployment. Raises `Problem` where it cannot do what it must."""
    made = name_for(options.name, account.region)
    name = made if options.role is None else options.role
    name = name.rpartition("/")[2]
    answer = account.find("iam", "get_role", RoleName=name)
    if answer is None:
        if options.role:
            raise Problem(f"there is no role {name}; --create-role makes one")
        arn = account.arn("iam", f"role/{name}", owner=account.id)
        return Role(name, arn, wanted, "make", f"role {name} is to be made")
    role = answer["Role"]
    if options.role:
        return Role(name, role["Arn"], wanted, "keep", f"role {check(account, role, wanted)}")
    if not is_ours(role, options.name):
        raise Problem(f"there is a role {name} that kogpt2 deploy did not make: --role {name}")
    policy = account.find("iam", "get_role_policy", RoleName=name, PolicyName=POLICY)
    same = policy and policy["PolicyDocument"] == document(wanted)
    return Role(name, role["Arn"], wanted, "keep" if same else "update", f"role {name}")


def check(account: Account, role: dict[str, Any], wanted: Needed) -> str:
    """What was found. Raises `Problem` that names each missing permission."""
    from botocore.exceptions import ClientError

    name = role["RoleName"]
    if "sagemaker.amazonaws.com" not in json.dumps(role["AssumeRolePolicyDocument"]):
        raise Problem(
            f"role {name} does not trust SageMaker: its trust policy must let"
            " sagemaker.amazonaws.com do sts:AssumeRole"
        )
    missing = []
    for resource, actions in wanted.items():
        # A pattern is tried with one thing that it stands for: another pattern may allow it, too.
        sample = resource[:-1] + "example.tar.gz" if resource.endswith((":*", "/*")) else resource
        try:
            results = account.ask_all(
                "iam",
                "simulate_principal_policy",
                "EvaluationResults",
                PolicySourceArn=role["Arn"],
                ActionNames=actions,
                ResourceArns=[sample],
            )
        except ClientError as error:
            if "AccessDenied" not in error.response["Error"]["Code"]:
                raise
            return f"{name}, its permissions unchecked: you may not iam:SimulatePrincipalPolicy"
        missing += [
            f"{result['EvalActionName']} on {resource}"
            for result in results
            if result["EvalDecision"] != "allowed"
        ]
    if missing:
        raise Problem(f"role {name} lacks {len(missing)}: {'; '.join(missing)}")
    return f"{name} may do all {count(wanted)} things it must"


def document(wanted: Needed) -> dict[str, Any]:
    """A policy that allows this and nothing else."""
    statements = [
        {"Effect": "Allow", "Action": actions, "Resource": resource}
        for resource, actions in wanted.items()
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def name_for(deployment: str, region: str) -> str:
    return f"{deployment}-{region}-sagemaker"


def is_ours(role: dict[str, Any], deployment: str) -> bool:
    tags = {tag["Key"]: tag["Value"] for tag in role.get("Tags", [])}
    return tags.get(TAG) == deployment


def grant(account: Account, role: Role, tags: dict[str, str]) -> None:
    """Makes our role, or brings what it may do up to what is needed."""
    if role.change == "make":
        account.do(
            "iam",
            "create_role",
            RoleName=role.name,
            AssumeRolePolicyDocument=json.dumps(TRUST),
            Description="SageMaker takes it on to run an endpoint",
            Tags=key_values(tags),
        )
    text = json.dumps(document(role.needed))
    account.do("iam", "put_role_policy", RoleName=role.name, PolicyName=POLICY, PolicyDocument=text)
