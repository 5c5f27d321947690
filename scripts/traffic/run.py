"""Runs a plan with Locust in this process and collects the results."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from datetime import datetime, timezone
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import STATE_STOPPED, LocalRunner
from locust.stats import stats_history
from tqdm import tqdm

from command.errors import Problem
from scripts.client.targets import Target
from scripts.traffic import samples
from scripts.traffic.loads import Loads
from scripts.traffic.plan import Plan
from scripts.traffic.users import Load, user_class

FORMAT = 1
TICK_S = 0.25
UNFINISHED = "unfinished"


def run(plan: Plan, target: Target, loads: Loads, web: int | None = None) -> dict[str, Any]:
    """Run a load test; return its report after warm-up, `seconds` and at most `timeout_s`.

    `web` is the port of Locust's page during the run. Raises `Problem`.
    """
    logging.getLogger("locust").setLevel(logging.ERROR)
    sys.argv[1:] = []  # Locust's page reads them as its own
    load = Load(plan, target)
    gevent.signal_handler(signal.SIGINT, load.end)
    environment = Environment(user_classes=[user_class(load)], stop_timeout=1)
    runner = environment.create_local_runner()
    page = None
    if web is not None:
        check_free(web)
        page = environment.create_web_ui("127.0.0.1", web)
        gevent.spawn(stats_history, runner)
        print(f"Locust's page: http://127.0.0.1:{web}", file=sys.stderr)
    started = datetime.now(timezone.utc)
    load.begun = time.monotonic() + plan.warm_up_s
    users = plan.users if plan.rate is None else 1
    runner.start(users, spawn_rate=max(users, 1))
    _wait(load, runner, load.begun + plan.seconds)
    measured_s = min(time.monotonic() - load.begun, plan.seconds)
    load.stopped = True
    end = time.monotonic() + plan.timeout_s + 1
    while load.running and time.monotonic() < end and not load.over:
        gevent.sleep(TICK_S / 5)
    if not load.over:
        load.give_up(UNFINISHED)
    measured = list(load.samples)
    runner.quit()
    if page is not None:
        page.stop()
    if load.problem is not None:
        raise load.problem
    if measured_s <= 0 or not measured:
        raise Problem("nothing was measured: the test ended before a request did")
    return {
        "format": FORMAT,
        "started": started.isoformat(timespec="seconds"),
        "plan": plan.describe(),
        **samples.results(measured, plan.models, plan.shares(), measured_s),
        "loads": loads(),
    }


def check_free(port: int) -> None:
    """Raise `Problem` if another program listens on the port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise Problem(f"--web: cannot listen on port {port}: {error.strerror}") from None


def _wait(load: Load, runner: LocalRunner, end: float) -> None:
    """Show progress until `end`, or until the run is stopped on Locust's page."""
    total = end - time.monotonic()
    with tqdm(
        total=round(total, 1),
        bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}",
        disable=None,  # unless stderr is a terminal
    ) as bar:
        began = time.monotonic()
        while (now := time.monotonic()) < end and not load.over and runner.state != STATE_STOPPED:
            gevent.sleep(min(TICK_S, end - now))
            bar.n = min(time.monotonic() - began, total)
            errors = sum(s.error is not None for s in load.samples[-1000:])
            state = "warming up" if time.monotonic() < load.begun else ""
            counts = f" {state} {len(load.samples)} answers, {len(load.running)} in flight"
            bar.set_postfix_str(counts + (f", {errors} errors lately" if errors else ""))


def sleep_with_bar(seconds: float) -> None:
    for _ in tqdm(range(round(seconds)), desc="waiting for CloudWatch", unit="s", disable=None):
        time.sleep(1)
