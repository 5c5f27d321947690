"""The console's event stream: the whole state first, then changes.

    {"whole"?, "models": {name: row or null}, "engine", "store", "pace"?, "journal"}

A change of a model's state is sent when it happens. The engine's counters are polled once a second
for all watchers together, and only while there are watchers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from common.errors import EngineError
from serving.api.gateway import Gateway
from serving.errors import ServingError, Unavailable
from serving.models.model import Model
from serving.store import StoredModel

SAMPLE_S = 1.0
PACE_SAMPLES = 60  # a minute of tokens per second
STORE_S = 30.0  # maximum age of a listing of the store; shorter: more requests to a remote store
SETTLE_S = 0.1  # changes within this time share a message; longer: the page is updated later
MAX_WATCHERS = 32
MAX_ALIASES = 5  # aliases shown in a model's row
PARTS = ("budget_bytes", "weight_bytes", "kv_bytes", "prefix_bytes")

Row = dict[str, Any]
MaySee = Callable[[str], bool]


@dataclass(frozen=True)
class Sample:
    """The engine's counters at one time; `models` by engine name, `rates` in tokens per second."""

    at: float = -SAMPLE_S  # on the monotonic clock
    totals: dict[str, Any] | None = None
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)

    def followed_by(self, totals: dict[str, Any] | None, at: float) -> Sample:
        models = {model["name"]: model for model in (totals or {"models": []})["models"]}
        rates = {
            name: max(model["tokens"] - self.models[name]["tokens"], 0) / (at - self.at)
            for name, model in models.items()
            if name in self.models
        }
        return Sample(at, totals, models, rates)


class Feed:
    """Makes the messages of all streams, with shared samples of the engine and store listings."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sample = Sample()
        self._sampling = asyncio.Lock()
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_SAMPLES)
        self._stored: list[StoredModel] = []
        self._listed_at = -STORE_S
        self._store_error, self._listed = "", gateway.settings.sagemaker_multi_model
        self._listing: asyncio.Task[None] | None = None
        self._watchers = 0

    def check_watchers(self) -> None:
        """Raise `Unavailable` if MAX_WATCHERS streams are open."""
        if self._watchers >= MAX_WATCHERS:
            raise Unavailable(
                f"{MAX_WATCHERS} console pages are open, which is the limit; close one",
                retry_after_s=10,
            )

    async def watch(self, may_see: MaySee = lambda name: True) -> AsyncGenerator[Row, None]:
        """Yield messages about the models that `may_see` allows, until the server stops."""
        self._watchers += 1
        try:
            async for message in self._messages(may_see):
                yield message
        finally:
            self._watchers -= 1

    async def _messages(self, may_see: MaySee) -> AsyncGenerator[Row, None]:
        gateway, journal = self._gateway, self._gateway.journal
        sent: dict[str, Row] = {}
        journaled, sampled = 0, -math.inf  # number of the last entry sent; time of the last sample
        while not gateway.draining:
            news = journal.news
            self._list_store()
            await self._take_sample()
            rows = self._rows(may_see)
            new = [entry for entry in journal.entries if entry.number > journaled]
            entries = [asdict(entry) for entry in new if may_see(entry.model)]
            message: dict[str, Any] = {
                "models": {name: row for name, row in rows.items() if sent.get(name) != row}
                | {name: None for name in sent if name not in rows},
                "engine": self._engine(),
                "store": {"listed": self._listed, "error": self._store_error},
                "journal": entries,
            }
            if sampled < 0:
                message |= {"whole": True, "pace": list(self._pace)}
            elif self._sample.at > sampled:
                message["pace"] = list(self._pace)[-1:]
            yield message
            sent, sampled = rows, self._sample.at
            journaled = max([journaled, *(entry.number for entry in new)])
            try:
                wait_s = self._sample.at + SAMPLE_S - time.monotonic()
                await asyncio.wait_for(news.wait(), max(wait_s, SETTLE_S))
                await asyncio.sleep(SETTLE_S)
            except asyncio.TimeoutError:
                pass

    # The engine

    async def _take_sample(self) -> None:
        async with self._sampling:
            now = time.monotonic()
            if now < self._sample.at + SAMPLE_S:
                return
            try:
                totals = await self._gateway.engine.statistics(timeout_s=2)
            except EngineError:
                totals = None
            before, now = self._sample, time.monotonic()
            self._sample = before.followed_by(totals, now)
            # An older sample is from before a pause without watchers: rates since then mean little.
            if now - before.at < 3 * SAMPLE_S:
                self._pace.append((_epoch_ms(now), round(sum(self._sample.rates.values()), 1)))

    def _engine(self) -> dict[str, Any]:
        totals, models = self._sample.totals, self._sample.models.values()
        lines = [model.line for model in self._gateway.registry.all()]
        waiting = sum(len(line.waiting) for line in lines)
        if totals is None:
            return {"up": False, "waiting": waiting}
        return {
            "up": True,
            **{name: totals[name] for name in PARTS},
            "rows": sum(model["running"] for model in models),
            "waiting": waiting + sum(model["waiting"] for model in models),
        }

    # Models

    def _list_store(self) -> None:
        """Start to list the store in the background, if the last listing is older than STORE_S."""
        gateway, busy = self._gateway, self._listing is not None and not self._listing.done()
        if not busy and time.monotonic() >= self._listed_at + STORE_S:
            self._listed_at = time.monotonic()
            if not gateway.settings.sagemaker_multi_model:
                self._listing = gateway.registry.spawn(self._list())

    async def _list(self) -> None:
        try:
            self._stored, self._store_error = await self._gateway.lookups.models(), ""
            self._listed = True
        except ServingError as error:
            self._store_error = error.message
        self._gateway.journal.notify()

    def _rows(self, may_see: MaySee) -> dict[str, Row]:
        """Return a row for each model that is stored, loading, loaded, or failed to load, by name.

        A row has at most MAX_ALIASES of the model's aliases.
        """
        gateway, failed = self._gateway, self._gateway.journal.failed
        rows: dict[str, Row] = {}
        for stored in self._stored:
            rows[stored.name] = self._row(stored.name, "stored", stored.size_bytes)
        for name in failed:
            rows.setdefault(name, self._row(name, "failed", None))
            rows[name] |= {"state": "failed", "reason": failed[name]}
        for model in gateway.registry.all():
            rows[model.name] = self._loaded(model, may_see)
        rows = {name: row for name, row in rows.items() if may_see(name)}
        for name, row in rows.items():
            if aliases := [alias for alias in gateway.aliases.of(name) if may_see(alias)]:
                row["aliases"] = aliases[:MAX_ALIASES]
        return rows

    def _row(self, name: str, state: str, size_bytes: int | None) -> Row:
        tally = self._gateway.metrics.tallies.get(name)
        good, bad, last_ms = (tally.good[0], tally.bad[0], tally.last_ms) if tally else (0, 0, 0)
        row: Row = {"state": state, "size_bytes": size_bytes}
        return {**row, "requests": good, "errors": bad, "last_ms": last_ms}

    def _loaded(self, model: Model, may_see: MaySee) -> Row:
        base, shared = model.stored_base, model.shared_base
        shows_base = base is None or may_see(base.name)
        row = self._row(model.name, model.state.value, model.stored.size_bytes)
        row |= {
            "residency": model.residency,
            "pinned": bool(model.settings.pinned),
            "in_engine": model.in_engine,
            "task": model.task,
            "in_flight": model.in_flight,
            "reason": model.restarts.reason if model.restoring else "",
            "base": shared.name if shared is not None and shows_base else "",
            "is_adapter": model.is_adapter,
            "whole_because": model.whole_because if shows_base else "",
        }
        counted = self._sample.models.get(model.engine_name)
        if counted is not None:
            first = counted["time_to_first_token_s"]
            answers = first["buckets"][-1][1]
            row |= {
                "residency": counted["residency"],
                "held_bytes": counted["held_bytes"],
                "tokens_s": round(self._sample.rates.get(model.engine_name, 0.0), 1),
                "first_token_s": round(first["sum"] / answers, 4) if answers else None,
            }
        return row


def _epoch_ms(at: float) -> int:
    """Convert a time of the monotonic clock to milliseconds since the epoch."""
    return round((time.time() - time.monotonic() + at) * 1000)
