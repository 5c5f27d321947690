"""Requests to an engine in this process, with the times of their tokens."""

from __future__ import annotations

import threading
import time
from typing import Any

from common.errors import EngineError
from engine.engine import Engine
from engine.generation import Token
from engine.text.prompts import Raw

DEADLINE_S = 120


class Request:
    """A request in flight, sent by the constructor. `options` are generation parameters."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        new_tokens: int,
        model: str = "m",
        **options: Any,
    ) -> None:
        parameters = engine.parameters(model, {"max_new_tokens": new_tokens, **options})
        self.ids: list[int] = []  # ids of the first answer
        self.came: list[float] = []  # the time of each token of all answers
        self._begun: dict[int, float] = {}  # seconds until each answer's first token
        self._left, self._done = parameters.num_return_sequences, threading.Event()
        self._error: EngineError | None = None
        self._engine, self._sent = engine, time.perf_counter()
        self._sequences = engine.submit(
            model, Raw(prompt), parameters, self._emit, timeout_s=DEADLINE_S
        ).result()

    def wait(self) -> Request:
        """Wait for the end of all answers. Raises `EngineError`."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self

    def wait_for_tokens(self, count: int) -> None:
        """Wait until `count` tokens have come or the request has ended."""
        while len(self.came) < count and not self._done.wait(0.001):
            pass

    def cancel(self) -> None:
        self._engine.cancel(self._sequences)

    def _emit(self, item: Token | EngineError) -> None:
        if isinstance(item, EngineError):
            self._error = item
            self._done.set()
            return
        self.came.append(time.perf_counter())
        self._begun.setdefault(item.index, self.came[-1] - self._sent)
        if item.index == 0:
            self.ids.append(item.id)
        self._left -= item.finish_reason is not None
        if not self._left:
            self._done.set()

    @property
    def tokens(self) -> int:
        """The number of tokens of all answers."""
        return len(self.came)

    @property
    def first_s(self) -> float:
        return min(self._begun.values())

    @property
    def all_begun_s(self) -> float:
        return max(self._begun.values())
