"""Locust's users: clients that wait for their answers, or requests at a fixed rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import gevent
import gevent.pool
from locust import User, constant, task
from locust.env import Environment

from command.errors import Problem
from scripts.client import answers
from scripts.client.errors import UNREACHABLE, CallFailed
from scripts.client.targets import Call, Target
from scripts.traffic.plan import Chooser, Plan
from scripts.traffic.samples import Sample

MAX_IN_FLIGHT = 1000
RETRY_S = (
    1.0  # of a client without a server; without a pause each would fail a thousand times a second
)


@dataclass
class Load:
    """The state of a run: requests count from `begun` on; none starts after `stopped`."""

    plan: Plan
    target: Target
    begun: float = 0.0
    stopped: bool = False
    problem: Problem | None = None
    samples: list[Sample] = field(default_factory=list)
    running: dict[int, tuple[str, float]] = field(default_factory=dict)
    users: int = 0
    over: bool = False

    def end(self) -> None:
        """End the run early: on Ctrl-C, after which a report follows, or on a problem."""
        self.over = self.stopped = True

    def chooser(self) -> Chooser:
        self.users += 1
        return Chooser(self.plan, self.users)

    def send(self, environment: Environment, model: str, body: bytes, due: float) -> bool:
        """Send one request and measure it from when it was due, not from when it was sent.

        Returns whether the server could be reached.
        """
        call = Call(model or None, body, self.plan.stream)
        completion = answers.Completion()
        error: CallFailed | None = None
        key = id(call)
        self.running[key] = (model, due)
        try:
            with self.target.call(call) as answer:
                for _ in answers.texts(answer, completion):
                    pass
        except CallFailed as failed:
            error = failed
        except Problem as problem:  # every request of this run would fail
            self.problem = self.problem or problem
            self.end()
            return False
        finally:
            self.running.pop(key, None)
        now = time.monotonic()
        first = completion.first_at
        sample = Sample(
            model,
            due - self.begun,
            now - due,
            None if first is None else first - due,
            completion.tokens,
            completion.server_s,
            None if error is None else error.kind,
        )
        if due >= self.begun:
            self.samples.append(sample)
        environment.events.request.fire(
            request_type="POST",
            name=model or "-",
            response_time=sample.seconds * 1000,
            response_length=len(completion.text.encode()),
            exception=error,
            context={},
        )
        return error is None or error.kind != UNREACHABLE

    def give_up(self, reason: str) -> None:
        """Count the requests in flight as errors."""
        for model, due in self.running.values():
            if due >= self.begun:
                now = time.monotonic()
                self.samples.append(Sample(model, due - self.begun, now - due, error=reason))
        self.running.clear()


def user_class(load: Load) -> type[User]:
    """Return Locust's class of users: one user for all arrivals, or a user per client."""

    class Client(User):  # type: ignore[misc]
        """A client that sends its next request after the answer."""

        wait_time = constant(0)

        def on_start(self) -> None:
            self.chooser = load.chooser()

        @task  # type: ignore[untyped-decorator]
        def call(self) -> None:
            if load.stopped:
                gevent.sleep(0.1)
                return
            model, body = self.chooser.next()
            if not load.send(self.environment, model, body, time.monotonic()):
                gevent.sleep(RETRY_S)

    class Arrivals(User):  # type: ignore[misc]
        """A single user that sends requests at a rate, independent of answers."""

        wait_time = constant(0)

        def on_start(self) -> None:
            self.chooser = load.chooser()
            self.pool = gevent.pool.Pool(MAX_IN_FLIGHT)
            self.due = time.monotonic()

        @task  # type: ignore[untyped-decorator]
        def arrive(self) -> None:
            assert load.plan.rate is not None
            self.due += self.chooser.pause_s(load.plan.rate)
            gevent.sleep(max(self.due - time.monotonic(), 0))
            if load.stopped:
                return
            model, body = self.chooser.next()
            # Waits at MAX_IN_FLIGHT; requests are measured from when they were due.
            self.pool.spawn(load.send, self.environment, model, body, self.due)

        def on_stop(self) -> None:
            self.pool.kill(block=False)

    return Client if load.plan.rate is None else Arrivals
