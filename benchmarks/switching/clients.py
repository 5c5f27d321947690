"""Clients that send streaming requests to many models, and statistics of the answers."""

from __future__ import annotations

import http.client
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders.llama_server import LlamaServer
from benchmarks.report.tables import FAULTS, Results, quantiles
from benchmarks.worker import at_once
from common.eviction import Held
from common.memory import MIB
from engine.budget import budget_bytes
from testbed import process_tree
from testbed.process import ProgramError
from testbed.server import Server, Streamed
from testbed.trace import policies, replay

STATES = ("hot", "warm", "parked", "cold")
ALONE_S = 30.0

Trace = Sequence[tuple[str, int]]  # (name of a model, number of a prompt) of each request
Expected = Mapping[tuple[str, int], str]  # the text of each model alone, by (model, prompt)


class Budgeted:
    """A plan with a memory budget: `engine_mib`, or an engine's own choice in a container."""

    engine_mib: int
    container_mib: int  # of a control group, or 0

    @property
    def budget_mib(self) -> int:
        container = self.container_mib * MIB
        return budget_bytes(container) // MIB if container else self.engine_mib


@dataclass(frozen=True)
class Answered:
    """A request and its answer; before it, the model's `state` and the number of `hot` models."""

    model: str
    prompt: int
    state: str
    hot: int
    began_s: float
    first_s: float  # since `began_s`
    seconds: float
    tokens: int
    text: str
    error: str = ""

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "text"}


@dataclass(frozen=True)
class Clients:
    """Clients, each of which pauses for `pause_s` after an answer.

    watches: query the models' residency before each call, which is slow with hundreds
    """

    prompts: Sequence[list[int]]
    count: int
    new_tokens: int
    pause_s: float = 0.0
    watches: bool = True

    def one(self, server: Server | LlamaServer) -> closing[Client]:
        return closing(Client(self, server))

    def run(
        self, server: Server | LlamaServer, trace: Trace, limit_s: float = math.inf
    ) -> tuple[list[Answered], float]:
        """Run a trace; return the answers in its order, and the seconds of all of them.

        Each client sends the trace's next request, until `limit_s` seconds have passed.
        """
        numbers = itertools.count()
        answers_by_turn: dict[int, Answered] = {}
        end = time.perf_counter() + limit_s

        def client(number: int) -> None:
            with self.one(server) as asking:
                time.sleep(self.pause_s * number / self.count)
                while (at := next(numbers)) < len(trace):
                    if time.perf_counter() > end:
                        return
                    answers_by_turn[at] = asking.ask(*trace[at])
                    time.sleep(self.pause_s)

        _, seconds = at_once(self.count, client, range(self.count))
        return [answers_by_turn[at] for at in sorted(answers_by_turn)], seconds

    def measure(
        self, server: Server | LlamaServer, trace: Trace, expected: Expected, limit_s: float
    ) -> tuple[list[Answered], Results]:
        """Run a trace, then requests to one model; return the trace's answers and statistics."""
        before = process_tree.usage(server.pid)
        answers, seconds = self.run(server, trace, limit_s)
        after, memory = process_tree.usage(server.pid), process_tree.memory(server.pid)
        one = [(trace[0][0], i % len(self.prompts)) for i in range(max(len(answers) // 4, 8))]
        alone, alone_s = self.run(server, one, ALONE_S)
        return answers, {
            "seconds": seconds,
            "tokens_per_s": sum(a.tokens for a in answers) / seconds,
            "alone_tokens_per_s": sum(a.tokens for a in alone) / alone_s,
            "first_token_s": quantiles([a.first_s for a in answers if not a.error]),
            "alone_first_token_s": quantiles([a.first_s for a in alone if not a.error]),
            "faults": count_faults([*answers, *alone], expected),
            "memory": memory,
            "usage": {key: after[key] - before[key] for key in after},
        }


class Client:
    """A client with a connection that stays open between requests."""

    def __init__(self, clients: Clients, server: Server | LlamaServer) -> None:
        self._clients, self._server, self._connection = clients, server, server.connect()

    def ask(self, model: str, prompt: int = 0, new_tokens: int | None = None) -> Answered:
        new_tokens = new_tokens or self._clients.new_tokens
        states = self._server.states() if self._clients.watches else {}
        state, hot = states.get(model, "cold"), sum(s == "hot" for s in states.values())
        path, body = self._server.stream(model, self._clients.prompts[prompt], new_tokens)
        began = time.perf_counter()
        first_s, tokens, text, error = 0.0, 0, "", ""
        try:
            answer = Streamed(self._connection, path, body)
            first_s, tokens, text = answer.first_s, answer.tokens, answer.text
            if tokens < new_tokens:
                error = f"lost: {tokens} tokens of {new_tokens}"
        except ProgramError as refused:
            error = str(refused)
        except (OSError, http.client.HTTPException) as lost:
            error = f"lost: {lost!r}"
        seconds = time.perf_counter() - began
        if error or isinstance(self._server, LlamaServer):  # which closes it unannounced
            self._connection.close()
        return Answered(model, prompt, state, hot, began, first_s, seconds, tokens, text, error)

    def must(self, model: str, prompt: int = 0, new_tokens: int | None = None) -> Answered:
        """Send a request as `ask`. Raises `ProgramError` if the answer is an error."""
        answer = self.ask(model, prompt, new_tokens)
        if answer.error:
            raise ProgramError(f"{model}: {answer.error}")
        return answer

    def close(self) -> None:
        self._connection.close()


def count_faults(answers: Sequence[Answered], expected: Expected) -> Results:
    """Count lost answers, errors, and texts that differ from those of the model alone."""
    errors = [a.error for a in answers if a.error]
    wrong = [a for a in answers if not a.error and a.text != expected[a.model, a.prompt]]
    return {
        "wrong": len(wrong),
        "lost": sum(not error[0].isdigit() for error in errors),
        "4xx": sum(error.startswith("4") for error in errors),
        "5xx": sum(error.startswith("5") for error in errors),
        "examples": errors[:5],
    }


def first_s(requests: Iterable[Results]) -> list[float]:
    """Return the seconds to the first tokens of the requests that did not fail."""
    return [a["first_s"] for a in requests if not a["error"]]


def by_state(requests: Sequence[Results]) -> dict[str, list[Results]]:
    return {s: some for s in STATES if (some := [a for a in requests if a["state"] == s])}


def joined(rounds: list[Results]) -> Results:
    """Return the rounds of a trace, with statistics of all their requests together."""
    requests = [a for one in rounds for a in one["requests"]]
    states = {"all": requests} | by_state(requests)
    against = [one["tokens_per_s"] / (one["alone_tokens_per_s"] or math.inf) for one in rounds]
    capacity = max(one["at_once"] for one in rounds)
    return {
        "rounds": rounds,
        "first_token_s": {state: quantiles(first_s(some)) for state, some in states.items()},
        "tokens_per_s": statistics.median(one["tokens_per_s"] for one in rounds),
        "against_alone": statistics.median(against),
        "at_once": capacity,
        "hits": hits(rounds, capacity),
        "faults": {key: sum(one["faults"][key] for one in rounds) for key in FAULTS},
    }


def hits(rounds: list[Results], capacity: int) -> dict[str, float]:
    """Return the hit rate as measured, and as simulated for policies with `capacity` models."""
    requests = [a for one in rounds for a in one["requests"]]
    measured = sum(a["state"] == "hot" for a in requests) / max(len(requests), 1)
    order = [*rounds[0]["warm_up"], *(a["model"] for a in rounds[0]["requests"])]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(order))}
    trace = [numbers[name] for name in order]
    counted = len(trace) / max(len(rounds[0]["requests"]), 1)  # no request of the warm-up is a hit
    models = dict.fromkeys(numbers.values(), Held(1, 1.0))
    return {"measured": measured} | {
        name: counted * replay(policy, trace, models, max(capacity, 1))[0]
        for name, policy in policies(trace, models).items()
    }
