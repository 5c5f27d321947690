"""An AWS account as a command sees it: its region, its clients, and who is asked."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from command.errors import Problem
from command.options import option

TAG = "kogpt2-serving"  # its value is the deployment, or `shared` for repositories and buckets
SHARED = [{"Key": TAG, "Value": "shared"}]


@dataclass(kw_only=True)
class Aws:
    """Of all commands here."""

    region: str | None = option(None, "as the AWS CLI: otherwise AWS_REGION or the profile's")
    profile: str | None = option(None, "as the AWS CLI: otherwise AWS_PROFILE or the default")


@dataclass(kw_only=True)
class Asking(Aws):
    dry_run: bool = option(False, "show what would be done, change nothing")
    yes: bool = option(False, "do not ask")


class Account:
    """Raises `Problem` where no region is set."""

    def __init__(self, options: Aws) -> None:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import ProfileNotFound

        try:
            self._session = boto3.session.Session(
                profile_name=options.profile, region_name=options.region
            )
        except ProfileNotFound as error:
            raise Problem(f"{error}; `aws configure list-profiles` lists them") from None
        if not self._session.region_name:
            raise Problem("no region: give --region, set AWS_REGION, or run `aws configure`")
        self.region: str = self._session.region_name
        config = Config(retries={"mode": "standard", "max_attempts": 6})
        self.client: Callable[[str], Any] = cache(partial(self._session.client, config=config))

    def pricing(self) -> Any:
        """A client of the Pricing API, which answers in us-east-1 for all regions; impatient, as
        there are other prices."""
        from botocore.config import Config

        config = Config(retries={"total_max_attempts": 1}, connect_timeout=3, read_timeout=10)
        return self._session.client("pricing", "us-east-1", config=config)

    @cached_property
    def id(self) -> str:
        number: str = self.client("sts").get_caller_identity()["Account"]
        return number

    def all(self, service: str, operation: str, key: str, **params: Any) -> list[Any]:
        """All pages of a list."""
        pages = self.client(service).get_paginator(operation).paginate(**params)
        return [item for page in pages for item in page.get(key, [])]

    def find(self, service: str, operation: str, **params: Any) -> Any:
        """None where there is no such thing."""
        from botocore.exceptions import ClientError

        try:
            return getattr(self.client(service), operation)(**params)
        except ClientError as error:
            code, message = error.response["Error"]["Code"], error.response["Error"]["Message"]
            if re.search("NoSuch|NotFound|^404$", code) or (
                code.startswith("Validation")
                and re.search("could not find|not exist", message, re.I)
            ):
                return None
            raise


def confirm(options: Asking, question: str) -> bool:
    """Asks on a terminal. Raises `Problem` where nobody can answer."""
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise Problem("nobody can be asked here: give --yes (or --dry-run to see what it would do)")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def log_group(deployment: str) -> str:
    """Where SageMaker writes the logs of an endpoint."""
    return f"/aws/sagemaker/Endpoints/{deployment}"
