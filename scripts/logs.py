"""`kogpt2 logs`: prints the logs of an endpoint."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import typer

from command.errors import Problem
from command.options import argument, option
from scripts.aws.account import Account, Aws

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
POLL_S = 3.0


def duration(text: str) -> int:
    """Parse 30s, 15m, 2h or 1d into seconds."""
    if not re.fullmatch(r"\d+[smhd]", text):
        raise typer.BadParameter(f"{text} is not a number with s, m, h or d")
    return int(text[:-1]) * UNITS[text[-1]]


@dataclass(kw_only=True)
class Logs(Aws):
    name: str = argument("the deployment")
    since: int = option("1h", "how far back: 30s, 15m, 2h, 1d", parser=duration)
    filter: str | None = option(None, "only lines with this text", metavar="TEXT")
    follow: bool = option(False, "print new lines until Ctrl-C")


def run(options: Logs) -> None:
    """Print the log lines of an endpoint's containers, oldest first.

    Examples:
    kogpt2 logs poems
    kogpt2 logs poems --since 15m --filter error
    kogpt2 logs poems --follow
    """
    from botocore.exceptions import ClientError

    account = Account(options)
    start_ms = int((time.time() - options.since) * 1000)
    seen: set[str] = set()
    while True:
        try:
            new = show(account, options, start_ms, seen)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceNotFoundException":
                raise
            raise Problem(f"no logs of {options.name} in {account.region}") from None
        if not options.follow:
            break
        # Events arrive late and out of order, so the last minute is always read again.
        start_ms = max(start_ms, int(time.time() * 1000) - 60_000)
        if not new:
            time.sleep(POLL_S)
    if not seen:
        print(f"no lines in the last {options.since} s; --since 1d looks further back")


def show(account: Account, options: Logs, start_ms: int, seen: set[str]) -> int:
    """Print the lines that are not in `seen`; return how many."""
    group = f"/aws/sagemaker/Endpoints/{options.name}"
    query: dict[str, Any] = {"logGroupName": group, "startTime": start_ms}
    if options.filter:  # quoted, because unquoted patterns are in CloudWatch's own syntax
        query["filterPattern"] = '"{}"'.format(options.filter.replace('"', '\\"'))
    events = account.all("logs", "filter_log_events", "events", **query)
    new = [event for event in events if event["eventId"] not in seen]
    for event in sorted(new, key=lambda event: event["timestamp"]):
        seen.add(event["eventId"])
        at = datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc)
        print(f"{at:%Y-%m-%d %H:%M:%S}Z {event['message'].rstrip()}", flush=True)
    return len(new)
