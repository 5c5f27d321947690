"""An AWS account as a command sees it: its region, its clients, and `--dry-run`."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scripts.lib.problem import Problem
from scripts.options import option

TAG = "kogpt2-serving"  # its value is the deployment, or `shared` for repositories and buckets
SHARED = "shared"
SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|_KEY$", re.IGNORECASE)

Tags = dict[str, str]


@dataclass(kw_only=True)
class Aws:
    """Of all commands here."""

    region: str | None = option(None, "as the AWS CLI: otherwise AWS_REGION or the profile's")
    profile: str | None = option(None, "as the AWS CLI: otherwise AWS_PROFILE or the default")


@dataclass(kw_only=True)
class Changing(Aws):
    dry_run: bool = option(False, "print the calls, change nothing")


@dataclass(kw_only=True)
class Asking(Changing):
    yes: bool = option(False, "do not ask")


class Account:
    """`ask` reads, `do` changes: a dry run prints what `do` would call, and calls it not.

    Raises `Problem` where no region or a wrong one is set.
    """

    def __init__(self, options: Aws) -> None:
        import boto3
        from botocore.exceptions import ProfileNotFound

        self.dry_run: bool = isinstance(options, Changing) and options.dry_run
        self.yes: bool = isinstance(options, Asking) and options.yes
        try:
            self._session = boto3.session.Session(
                profile_name=options.profile, region_name=options.region
            )
        except ProfileNotFound as error:
            raise Problem(f"{error}; `aws configure list-profiles` lists them") from None
        if not self._session.region_name:
            raise Problem("no region: give --region, set AWS_REGION, or run `aws configure`")
        self.region: str = self._session.region_name
        self._clients: dict[str, Any] = {}
        self._check_region()

    def _check_region(self) -> None:
        known = [
            region
            for partition in self._session.get_available_partitions()
            for region in self._session.get_available_regions("sagemaker", partition)
        ]
        if self.region not in known:
            near = difflib.get_close_matches(self.region, known, 3)
            meant = f": did you mean {' or '.join(near)}?" if near else ""
            raise Problem(f"{self.region} is no region that has SageMaker{meant}")

    def client(self, service: str) -> Any:
        from botocore.config import Config

        if service not in self._clients:
            config = Config(retries={"mode": "standard", "max_attempts": 6})
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    @cached_property
    def id(self) -> str:
        number: str = self.ask("sts", "get_caller_identity")["Account"]
        return number

    def arn(self, service: str, resource: str, region: str = "", owner: str = "") -> str:
        partition = self._session.get_partition_for_region(self.region)
        return f"arn:{partition}:{service}:{region}:{owner}:{resource}"

    def ask(self, service: str, operation: str, **params: Any) -> Any:
        return getattr(self.client(service), operation)(**params)

    def ask_all(self, service: str, operation: str, key: str, **params: Any) -> list[Any]:
        """All pages of a list."""
        pages = self.client(service).get_paginator(operation).paginate(**params)
        return [item for page in pages for item in page.get(key, [])]

    def find(self, service: str, operation: str, **params: Any) -> Any:
        """None where there is no such thing."""
        from botocore.exceptions import ClientError

        try:
            return self.ask(service, operation, **params)
        except ClientError as error:
            if is_missing(error):
                return None
            raise

    def do(self, service: str, operation: str, **params: Any) -> Any:
        if self.dry_run:
            print(f"  {as_command(service, operation, params)}")
            return {}
        return self.ask(service, operation, **params)

    def confirm(self, question: str) -> bool:
        """Asks on a terminal. Raises `Problem` where nobody can answer."""
        if self.dry_run or self.yes:
            return True
        if not sys.stdin.isatty():
            raise Problem("nobody can be asked here: give --yes (or --dry-run to see the calls)")
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False


def is_missing(error: Any) -> bool:
    """Whether a ClientError says that the thing is not there; each service says so in its way."""
    found = error.response["Error"]
    if re.search("NoSuch|NotFound|^404$", found["Code"]):
        return True
    return found["Code"] == "ValidationException" and bool(
        re.search("could not find|does not exist|no scalable target", found["Message"], re.I)
    )


def as_command(service: str, operation: str, params: dict[str, Any]) -> str:
    """The call as an AWS CLI line, with secrets in environment variables left out."""
    name = {"s3": "s3api"}.get(service, service)
    shown = json.dumps(_masked(params), ensure_ascii=False, default=str)
    return f"aws {name} {operation.replace('_', '-')} --cli-input-json {shlex.quote(shown)}"


def _masked(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _masked(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, name) for item in value]
    return "***" if SECRET.search(name) and name != "KmsKeyId" else value


def log_group(deployment: str) -> str:
    """Where SageMaker writes the logs of an endpoint."""
    return f"/aws/sagemaker/Endpoints/{deployment}"


def key_values(tags: Tags, key: str = "Key", value: str = "Value") -> list[Tags]:
    """Tags as most services want them."""
    return [{key: name, value: text} for name, text in tags.items()]
