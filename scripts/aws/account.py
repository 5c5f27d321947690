"""An AWS account: its region and clients, and the confirmation of a change."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Protocol

from command.errors import Problem
from command.options import option

TAG = "kogpt2-serving"  # its value is the deployment, or `shared` for repositories and buckets
SHARED = [{"Key": TAG, "Value": "shared"}]


@dataclass(kw_only=True)
class Aws:
    region: str | None = option(None, "AWS region (default: AWS_REGION or the profile's)")
    profile: str | None = option(None, "AWS profile (default: AWS_PROFILE)")


@dataclass(kw_only=True)
class Change(Aws):
    dry_run: bool = option(False, "show the changes, make none")
    yes: bool = option(False, "make changes without asking")


class Place(Protocol):
    """Options with a region and a profile."""

    region: str | None
    profile: str | None


class Account:
    """Clients of an AWS account in one region. Raises `Problem` if no region is set.

    session: boto3's, for clients with a configuration of their own
    """

    def __init__(self, options: Place) -> None:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import ProfileNotFound

        try:
            self.session = boto3.session.Session(
                profile_name=options.profile, region_name=options.region
            )
        except ProfileNotFound as error:
            raise Problem(f"{error}; `aws configure list-profiles` lists them") from None
        if not self.session.region_name:
            raise Problem("no region: give --region, set AWS_REGION, or run `aws configure`")
        self.region: str = self.session.region_name
        config = Config(retries={"mode": "standard", "max_attempts": 6})
        self.client: Callable[[str], Any] = cache(partial(self.session.client, config=config))

    def pricing(self) -> Any:
        """Return a client of the Pricing API, which is in us-east-1 for all regions.

        Its timeouts are short, because instances.json has prices to fall back on.
        """
        from botocore.config import Config

        config = Config(retries={"total_max_attempts": 1}, connect_timeout=3, read_timeout=10)
        return self.session.client("pricing", "us-east-1", config=config)

    @cached_property
    def id(self) -> str:
        number: str = self.client("sts").get_caller_identity()["Account"]
        return number

    def all(self, service: str, operation: str, key: str, **params: Any) -> list[Any]:
        """Return the items of all pages of a list."""
        pages = self.client(service).get_paginator(operation).paginate(**params)
        return [item for page in pages for item in page.get(key, [])]

    def find(self, service: str, operation: str, **params: Any) -> Any:
        """Call an operation; return None if the resource does not exist."""
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


def confirm(options: Change, question: str) -> bool:
    """Prompts for a yes or no on the terminal. Raises `Problem` if there is no terminal."""
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise Problem(
            "standard input is no terminal to ask on: give --yes, or --dry-run to see the changes"
        )
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
