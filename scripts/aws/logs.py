"""Prints what an endpoint's containers wrote, oldest first."""

from __future__ import annotations

import argparse
import re
import time
from datetime import datetime, timezone

from scripts.aws import resources
from scripts.aws.account import Account, log_group, parser
from scripts.lib.documents import Problem

EXAMPLE = """examples:
  scripts/logs poems
  scripts/logs poems --since 15m --filter error
  scripts/logs poems --follow
"""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
POLL_S = 3.0


def duration(text: str) -> int:
    """Seconds."""
    if not re.fullmatch(r"\d+[smhd]", text):
        raise argparse.ArgumentTypeError(f"{text} is not a number with s, m, h or d")
    return int(text[:-1]) * UNITS[text[-1]]


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = parser("logs", __doc__, EXAMPLE)
    made.add_argument("name", help="of the deployment")
    made.add_argument("--since", type=duration, default="1h", help="30s, 15m, 2h, 1d (1h)")
    made.add_argument("--filter", metavar="TEXT", help="only lines with this text")
    made.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    return made.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    account = Account(args)
    if resources.log_group_owner(account, args.name) is None:
        raise Problem(
            f"no logs of {args.name} in {account.region}: scripts/status lists what there is"
        )
    start_ms = int((time.time() - args.since) * 1000)
    seen: set[str] = set()
    while True:
        new = show(account, args, start_ms, seen)
        if not args.follow:
            break
        # Streams arrive late and out of order, so the last minute is always asked again.
        start_ms = max(start_ms, int(time.time() * 1000) - 60_000)
        if not new:
            time.sleep(POLL_S)
    if not seen:
        print(f"nothing since {args.since} s; --since 1d looks further back")


def show(account: Account, args: argparse.Namespace, start_ms: int, seen: set[str]) -> int:
    """Prints what has not been seen yet, and how much that was."""
    # A quoted pattern is a text as it stands; CloudWatch has a language for others.
    quoted = '"{}"'.format(args.filter.replace('"', '\\"')) if args.filter else ""
    events = account.ask_all(
        "logs",
        "filter_log_events",
        "events",
        logGroupName=log_group(args.name),
        startTime=start_ms,
        **({"filterPattern": quoted} if quoted else {}),
    )
    new = [event for event in events if event["eventId"] not in seen]
    for event in sorted(new, key=lambda event: event["timestamp"]):
        seen.add(event["eventId"])
        at = datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc)
        print(f"{at:%Y-%m-%d %H:%M:%S}Z {event['message'].rstrip()}", flush=True)
    return len(new)
