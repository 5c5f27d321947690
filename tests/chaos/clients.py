"""Clients that call, load, unload and disconnect continuously, and record the outcomes."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tests.chaos.calls import call, request
from tests.chaos.history import LIST, LOAD, PUT, ROUTES, UNLOAD, Op

PROMPTS = ("가각갂", "간갇갉갊")
# How often each kind of request is made.
MIX = {
    "predictions": 30,
    "predictions-stream": 20,
    "completions": 12,
    "completions-stream": 8,
    "hang up": 6,
    LOAD: 9,
    UNLOAD: 6,
    PUT: 2,
    LIST: 2,
}
STEADY_SHARE = 0.6
PAUSE_S = 0.05  # of a client after each answer, on average
RETRIES = 5


@dataclass(frozen=True)
class Models:
    """The models of a run: clients unload and replace only those that move.

    zipf: the exponent of their popularity, each kind's first the most popular; 0: all alike
    full: steady ones that are as large as KoGPT2; all others are tiny
    """

    steady: tuple[str, ...]
    moving: tuple[str, ...]
    versions: int  # of those that move; a steady one has one
    zipf: float = 0.0
    full: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.steady, *self.moving)

    def versions_of(self, model: str) -> int:
        return self.versions if model in self.moving else 1

    def choose(self, chance: random.Random, kind: str) -> str:
        """A model for a request of this kind."""
        among = self.moving
        if kind not in (LOAD, UNLOAD, PUT) and chance.random() < STEADY_SHARE:
            among = self.steady
        weights = [1 / rank**self.zipf for rank in range(1, len(among) + 1)]
        return chance.choices(among, weights)[0]


class Clients:
    """`count` clients, from `start` to `stop`; `ops` is their history. `put` replaces a model in
    the store; an answer is lost after `lost_s`."""

    def __init__(
        self,
        ports: tuple[int, int],
        models: Models,
        seed: int,
        count: int,
        put: Callable[[str, int], None],
        mix: Mapping[str, int] = MIX,
        pause_s: float = PAUSE_S,
        lost_s: float = 150.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.ops: list[Op] = []
        self._ports, self._models, self._put, self._host = ports, models, put, host
        self._seed, self._mix, self._pause_s, self._lost_s = seed, mix, pause_s, lost_s
        self._stop, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._busy = 0
        self._changed = threading.Condition()
        self._put_turn = threading.Lock()
        self._stored = dict.fromkeys(models.all, 0)
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"client {number}")
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def pause(self) -> None:
        """Returns once no request is in flight."""
        self._go.clear()
        with self._changed:
            self._changed.wait_for(lambda: self._busy == 0)

    def resume(self) -> None:
        self._go.set()

    def stop(self) -> None:
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    def ask(self, client: int, kind: str, model: str = "", prompt: int = 0) -> Op:
        """Send a request without disconnecting."""
        id = f"{self._seed}-{client}-{kind}-{time.monotonic_ns()}"
        return self._send(Op(id, client, kind, model, time.monotonic(), 0, prompt=prompt))

    def _send(self, op: Op, most_tokens: float = math.inf) -> Op:
        sent = request(op.kind, op.model, PROMPTS[op.prompt])
        op = call(self._ports, sent, op, self._lost_s, most_tokens, self._host)
        self.ops.append(op)
        return op

    def _run(self, client: int) -> None:
        chance = random.Random(f"{self._seed} {client}")  # noqa: S311
        numbers = itertools.count()
        while not self._stop.is_set():
            with self._changed:
                self._busy += 1
            if self._go.is_set():
                self._act(client, f"{self._seed}-{client}-{next(numbers)}", chance)
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
            self._go.wait()
            self._stop.wait(chance.uniform(0, 2 * self._pause_s))

    def _act(self, client: int, id: str, chance: random.Random) -> None:
        kind = chance.choices(list(self._mix), list(self._mix.values()))[0]
        model = self._models.choose(chance, kind)
        prompt = chance.randrange(len(PROMPTS))
        if kind == PUT:
            self.replace(client, id, model)
            return
        most_tokens = math.inf
        if kind == "hang up":
            kind, most_tokens = chance.choice(ROUTES), chance.randrange(3)
        name = "" if kind == LIST else model
        for attempt in range(RETRIES):  # after the Retry-After of a 503
            begin = time.monotonic()
            op = Op(f"{id}-{attempt}", client, kind, name, begin, 0, prompt=prompt)
            op = self._send(op, most_tokens)
            if op.status != 503 and (op.status or op.hung_up):
                return
            if not self._go.is_set() or self._stop.wait(op.retry_after_s or 0.2):
                return

    def replace(self, client: int, id: str, model: str) -> None:
        """Puts the next version of a model that moves into the store."""
        with self._put_turn:
            version = (self._stored[model] + 1) % self._models.versions
            op = Op(id, client, PUT, model, time.monotonic(), 0, 200, version=version)
            self._put(model, version)
            self._stored[model] = version
            self.ops.append(replace(op, end=time.monotonic()))

    def first_versions(self, at: float) -> list[Op]:
        """The store's versions at the start."""
        return [
            Op(f"first-{model}", -1, PUT, model, at, at, 200, version=0) for model in self._stored
        ]
