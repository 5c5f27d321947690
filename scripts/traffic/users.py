"""Locust's users: clients that wait for their answers, or requests that come at a rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import gevent
import gevent.pool
from locust import User, constant, task
from locust.env import Environment

from command.errors import Problem
from scripts.client import answers
from scripts.client.errors import CallFailed
from scripts.client.targets import Call, Target
from scripts.traffic.plan import Chooser, Plan
from scripts.traffic.samples import Sample

MAX_IN_FLIGHT = 1000


@dataclass
class Load:
    """What a run is doing. `begun` is when counting begins; `stopped` lets nothing more begin."""

    plan: Plan
    target: Target
    begun: float = 0.0
    stopped: bool = False
    problem: Problem | None = None
    samples: list[Sample] = field(default_factory=list)
    running: dict[int, tuple[str, float]] = field(default_factory=dict)
    users: int = 0

    interrupted: bool = False

    def interrupt(self) -> None:
        """Ctrl-C: what has been measured is reported."""
        self.interrupted = self.stopped = True

    @property
    def over(self) -> bool:
        return self.interrupted or self.problem is not None

    def chooser(self) -> Chooser:
        self.users += 1
        return Chooser(self.plan, self.users)

    def send(self, environment: Environment, model: str, body: bytes, due: float) -> None:
        """One request, measured from when it was due: a client that is behind hides nothing."""
        accept = answers.ACCEPT_STREAM if self.plan.stream else "application/json"
        call = Call(model or None, body, accept=accept, stream=self.plan.stream)
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
        except Problem as problem:  # no request of this run can be right
            self.problem = self.problem or problem
            self.stopped = True
            return
        finally:
            self.running.pop(key, None)
        self._keep(environment, model, due, completion, error)

    def _keep(
        self,
        environment: Environment,
        model: str,
        due: float,
        completion: answers.Completion,
        error: CallFailed | None,
    ) -> None:
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

    def give_up(self, reason: str) -> None:
        """Requests that are still running count as errors."""
        for model, due in self.running.values():
            if due >= self.begun:
                now = time.monotonic()
                self.samples.append(Sample(model, due - self.begun, now - due, error=reason))
        self.running.clear()


def user_class(load: Load) -> type[User]:
    """For `Environment(user_classes=[...])`."""
    return _arrivals(load) if load.plan.rate is not None else _clients(load)


def _clients(load: Load) -> type[User]:
    class Client(User):  # type: ignore[misc]
        """Sends when it has its answer."""

        wait_time = constant(0)

        def on_start(self) -> None:
            self.chooser = load.chooser()

        @task  # type: ignore[untyped-decorator]
        def call(self) -> None:
            if load.stopped:
                gevent.sleep(0.1)
                return
            model, body = self.chooser.next()
            load.send(self.environment, model, body, time.monotonic())

    return Client


def _arrivals(load: Load) -> type[User]:
    class Arrivals(User):  # type: ignore[misc]
        """Sends at a rate, whether answers come or not: as independent people do."""

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
            # Waits when so many are under way; they were due all the same.
            self.pool.spawn(load.send, self.environment, model, body, self.due)

        def on_stop(self) -> None:
            self.pool.kill(block=False)

    return Arrivals
