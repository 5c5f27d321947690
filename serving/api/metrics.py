"""The gateway's own metrics for Prometheus, and the text of `/metrics`.

Metrics of what other parts count, such as the engine, are declared in `serving.api.collectors`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from common.histogram import SECONDS
from serving.aliases import Aliases
from serving.api.collectors import Scrape
from serving.tokens import Token

LABELS = ("model",)
# An unloaded model's series last for some more scrapes, usually a minute apart at most.
GONE_S = 600.0
MAX_GONE = 1000  # unloaded models with series; each has some 40 lines
# Models with series, loaded or not, between two scrapes: without scrapes no others are dropped.
MAX_LABELLED = 4 * MAX_GONE
MAX_TALLIES = 10_000  # models with a tally, which takes some 400 bytes
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
T = TypeVar("T")


@dataclass
class Tally:
    """Count and total seconds of a model's successful requests, and of its failed ones."""

    good: tuple[int, float] = (0, 0.0)
    bad: tuple[int, float] = (0, 0.0)
    last_ms: int = 0  # end of the last request, since the epoch

    def add(self, status: int, seconds: float) -> None:
        self.last_ms = round(time.time() * 1000)
        if status < 400:
            self.good = self.good[0] + 1, self.good[1] + seconds
        else:
            self.bad = self.bad[0] + 1, self.bad[1] + seconds


class Metrics:
    """What the gateway counts and times itself; `text` adds the counts of others."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, run_dir: Path | None = None
    ) -> None:
        """Register all metrics. `run_dir` is the folder with the entrypoint's counts."""
        self._run_dir, self._registry = run_dir, CollectorRegistry()
        counter = functools.partial(Counter, registry=self._registry)
        histogram = functools.partial(Histogram, registry=self._registry, buckets=SECONDS)
        text = "Requests answered, by status"
        self._requests = counter("kogpt2_requests", text, (*LABELS, "status"))
        text = "Time from a request to its answer"
        self._seconds = histogram("kogpt2_request_seconds", text, LABELS)
        self._stages = {
            event: histogram(f"kogpt2_model_{name}_seconds", text, labels)
            for event, name, labels, text in (
                ("fetched", "fetch", LABELS, "Time to fetch and unpack one; near zero when cached"),
                ("loaded", "load", LABELS, "Time from a fetched model to a ready one"),
                # Without the label: the model is no longer there when these are observed.
                ("unloaded", "unload", (), "Time to drain and free a model"),
                ("evicted", "idle_at_eviction", (), "How long an evicted model had been idle"),
            )
        }
        self._now = now
        self._labelled: dict[str, None] = {}  # names of models with series, the last used last
        self._gone: dict[str, float] = {}  # since when models are unloaded, by name
        self.tallies: dict[str, Tally] = {}  # by name, the last used last
        text = "Fetches of models, from the disk cache or not"
        self._fetches = counter("kogpt2_cache_requests", text, ["hit"])
        self._fetched_bytes = counter("kogpt2_fetched_bytes", "Bytes of models downloaded")
        text = "When the gateway started"
        Gauge("kogpt2_start_time_seconds", text, registry=self._registry).set(time.time())
        text = "Loads by POST /models, /adapters and the model repository that failed, by status"
        self._failed_loads = counter("kogpt2_load_failures", text, ["status"])

    def request(self, model: str, status: int, seconds: float) -> None:
        if status == 404:  # names that do not exist are no label
            model = ""
        self._label(model)
        tally = self.tallies[model] = self.tallies.pop(model, Tally())
        tally.add(status, seconds)
        if len(self.tallies) > MAX_TALLIES:
            del self.tallies[next(iter(self.tallies))]
        self._requests.labels(model, str(status)).inc()
        self._seconds.labels(model).observe(seconds)

    def _label(self, name: str) -> None:
        """Note a use of a model's series; beyond `MAX_LABELLED` drop the longest unused."""
        self._labelled.pop(name, None)
        self._labelled[name] = None
        if len(self._labelled) > MAX_LABELLED:
            self._drop(list(self._labelled)[:1])  # a copy, as `text` removes names on a thread

    def _drop(self, names: Iterable[str]) -> None:
        """Remove the series of models."""
        for name in names:
            self._labelled.pop(name, None)
            for metric in (
                self._requests, self._seconds, self._stages["fetched"], self._stages["loaded"]
            ):  # fmt: skip
                metric.remove_by_labels({"model": name})

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Count the load inside the context, which a client requested, if it fails."""
        try:
            yield
        except Exception as error:
            self._failed_loads.labels(str(getattr(error, "status", 500))).inc()
            raise

    async def loaded(self, load: Awaitable[T]) -> T:
        """Wait for a load that a client requested, and count it if it fails."""
        with self.loading():
            return await load

    def observe(self, event: str, model: Any, seconds: float) -> None:
        """Record the seconds of an event: "fetched", "loaded", "unloaded" or "evicted"."""
        stage = self._stages[event]
        if event in ("fetched", "loaded"):
            self._label(model.name)
            stage = stage.labels(model.name)
        stage.observe(seconds)
        if event == "fetched" and model.fetched is not None:
            self._fetches.labels(str(model.fetched.hit).lower()).inc()
            self._fetched_bytes.inc(model.fetched.bytes)

    def text(
        self,
        statistics: dict[str, Any] | None,
        names: dict[str, str],
        waiting: Mapping[str, int],
        tokens: Sequence[Token] = (),
        aliases: Aliases | None = None,
    ) -> bytes:
        """Return the metrics in Prometheus' text format.

        names: names of all models, by their names in the engine; series of other models are dropped
        after `GONE_S`, or earlier if there are more than `MAX_GONE`
        waiting: requests queued in the gateway, by model
        tokens: the tokens of TOKENS_FILE
        """
        now, there = self._now(), {"", *names.values()}
        absent = self._labelled.keys() - there
        self._gone = {name: self._gone.get(name, now) for name in absent}
        newest = sorted(absent, key=self._gone.__getitem__)[-MAX_GONE:]
        gone = absent - {name for name in newest if now - self._gone[name] < GONE_S}
        self._drop(gone)
        scrape = Scrape(self._run_dir, statistics, names, waiting, tokens, aliases or Aliases())
        return generate_latest(self._registry) + generate_latest(scrape)
