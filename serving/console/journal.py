"""The journal of the console: recent loads and unloads of models, and errors of failed loads."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from dataclasses import dataclass

from serving.errors import LoadCancelled, explained
from serving.models.model import Model, State

MAX_ENTRIES = 50
MAX_FAILED = 256  # names
EVENTS = ("loaded", "unloaded", "evicted")


@dataclass(frozen=True)
class Entry:
    """An event; `seconds` is its duration, or for an eviction the time that the model was idle."""

    number: int
    at_ms: int  # since the epoch
    event: str  # one of EVENTS, or failed
    model: str
    seconds: float | None = None
    reason: str = ""


class Journal:
    """Records the events of `Registry` and `Evictor`; a reader waits for `news`."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self.failed: dict[str, str] = {}  # reasons by model, until its next load begins
        self._numbers = itertools.count(1)
        # Set and replaced at each change. Get it before reading the entries, to miss no change.
        self.news = asyncio.Event()

    def notify(self) -> None:
        """Wakes all readers."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def observe(self, event: str, model: Model, seconds: float) -> None:
        """Record a stage of a model's life; a callback of `Registry` and `Evictor`."""
        if event in EVENTS:
            self._add(event, model.name, seconds)

    def changed(self, model: Model) -> None:
        """Record a load that failed; `Registry` calls it at each change of a model's state."""
        if model.error is None:
            if model.state is State.FETCHING:
                self.failed.pop(model.name, None)
        elif not isinstance(model.error, LoadCancelled):
            reason = self.failed[model.name] = explained(model.error)
            if len(self.failed) > MAX_FAILED:
                del self.failed[next(iter(self.failed))]
            self._add("failed", model.name, None, reason)
        self.notify()

    def _add(self, event: str, model: str, seconds: float | None, reason: str = "") -> None:
        at_ms = round(time.time() * 1000)
        entry = Entry(next(self._numbers), at_ms, event, model, seconds, reason)
        self.entries.append(entry)
        self.notify()
