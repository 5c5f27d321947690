"""Counts for Prometheus, by model."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from common.histogram import SECONDS
from serving.aliases import Aliases
from serving.process.counts import DROPPED, PROCESSES, read_counts
from serving.tokens import Token

LABELS = ("model",)
# What an unloaded model did stays for some scrapes, usually a minute apart at most.
GONE_S = 600.0
MAX_GONE = 1000  # models; each has some 40 lines
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Tally:
    """Requests of a model that were answered, and those that were not: how many, how long."""

    good: tuple[int, float] = (0, 0.0)
    bad: tuple[int, float] = (0, 0.0)
    last_ms: int = 0  # since the epoch

    def add(self, status: int, seconds: float) -> None:
        self.last_ms = round(time.time() * 1000)
        if status < 400:
            self.good = self.good[0] + 1, self.good[1] + seconds
        else:
            self.bad = self.bad[0] + 1, self.bad[1] + seconds


class Metrics:
    """Everything that `/metrics` shows."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, run_dir: Path | None = None
    ) -> None:
        """`run_dir` has what the entrypoint counts."""
        self._registry = CollectorRegistry()
        on = self._registry
        self._requests = Counter(
            "kogpt2_requests", "Requests answered, by status", ["model", "status"], registry=on
        )
        self._seconds = Histogram(
            "kogpt2_request_seconds",
            "Time from a request to its answer",
            ["model"],
            buckets=SECONDS,
            registry=on,
        )
        self._stages = {
            event: Histogram(
                f"kogpt2_model_{name}_seconds", text, labels, buckets=SECONDS, registry=on
            )
            for event, name, labels, text in (
                ("fetched", "fetch", LABELS, "Time to fetch and unpack one; near zero when cached"),
                ("loaded", "load", LABELS, "Time from a fetched model to a ready one"),
                # Those are gone then.
                ("unloaded", "unload", (), "Time to drain and free a model"),
                ("evicted", "idle_at_eviction", (), "How long an evicted model had been idle"),
            )
        }
        self._now = now
        self._labelled: set[str] = set()
        self._gone: dict[str, float] = {}  # since when, of those models that are not there
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._fetches = Counter(
            "kogpt2_cache_requests",
            "Fetches of models, from the disk cache or not",
            ["hit"],
            registry=on,
        )
        self._fetched_bytes = Counter(
            "kogpt2_fetched_bytes", "Bytes of models downloaded", registry=on
        )
        self._started = Gauge("kogpt2_start_time_seconds", "When the gateway started", registry=on)
        self._started.set(time.time())
        self._engine = _EngineStatistics()
        self._registry.register(self._engine)
        self._usage = _TokenUsage()
        self._registry.register(self._usage)
        self._aliases = _AliasRequests()
        self._registry.register(self._aliases)
        self._registry.register(_Counts(run_dir))
        self._failed_loads = Counter(
            "kogpt2_load_failures",
            "Loads by POST /models, /adapters and the model repository that failed, by status",
            ["status"],
            registry=on,
        )

    def request(self, model: str, status: int, seconds: float) -> None:
        if status == 404:  # names that do not exist are no label
            model = ""
        self._labelled.add(model)
        self.tallies[model].add(status, seconds)
        self._requests.labels(model, str(status)).inc()
        self._seconds.labels(model).observe(seconds)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Counts a load by hand that fails."""
        try:
            yield
        except Exception as error:
            self._failed_loads.labels(str(getattr(error, "status", 500))).inc()
            raise

    async def loaded(self, load: Awaitable[Any]) -> None:
        """Waits for a load by hand, which is counted if it fails."""
        with self.loading():
            await load

    def observe(self, event: str, model: Any, seconds: float) -> None:
        """A stage in a model's life; see `serving.models.registry` and `.on_demand`."""
        stage = self._stages[event]
        if event in ("fetched", "loaded"):
            self._labelled.add(model.name)
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
        """The exposition format. `names` maps the engine's names to those of all models that there
        are; what belongs to others is dropped after `GONE_S`, or to make room for later ones.
        `waiting`: requests in the gateway, by model. `tokens` are those of TOKENS_FILE."""
        now, there = self._now(), {"", *names.values()}
        absent = self._labelled - there
        self._gone = {name: self._gone.get(name, now) for name in absent}
        newest = sorted(absent, key=self._gone.__getitem__)[-MAX_GONE:]
        gone = absent - {name for name in newest if now - self._gone[name] < GONE_S}
        for metric in (
            self._requests, self._seconds, self._stages["fetched"], self._stages["loaded"]
        ):  # fmt: skip
            for name in gone:
                metric.remove_by_labels({"model": name})
        self._labelled -= gone
        self._engine.statistics, self._engine.names, self._engine.waiting = (
            statistics, names, waiting
        )  # fmt: skip
        self._usage.tokens, self._aliases.aliases = tokens, aliases or Aliases()
        return generate_latest(self._registry)


USAGE = {
    "requests": "Requests with a token of TOKENS_FILE, those refused included",
    "prompt_tokens": "Tokens of the prompts of its answers",
    "completion_tokens": "Tokens made for its answers",
}


class _TokenUsage(Collector):
    """What the tokens of TOKENS_FILE were used for, by their names in it: no others are labels."""

    def __init__(self) -> None:
        self.tokens: Sequence[Token] = ()

    def collect(self) -> Iterator[Any]:
        for name, text in USAGE.items():
            family = CounterMetricFamily(f"kogpt2_token_{name}", text, labels=["token"])
            for token in self.tokens:
                family.add_metric([token.name], getattr(token.usage, name))
            yield family
        family = CounterMetricFamily(
            "kogpt2_token_refusals",
            "Requests refused: a model not allowed, loading not allowed, or beyond a limit",
            labels=["token", "reason"],
        )
        for token in self.tokens:
            for reason, count in token.usage.refused.items():
                family.add_metric([token.name, reason], count)
        yield family


class _AliasRequests(Collector):
    """Of the store's aliases.json: no other names are labels."""

    def __init__(self) -> None:
        self.aliases = Aliases()

    def collect(self) -> Iterator[Any]:
        yield GaugeMetricFamily("kogpt2_aliases", "Aliases in use", len(self.aliases.all()))
        yield GaugeMetricFamily(
            "kogpt2_aliases_wrong",
            "Whether the store's aliases.json is wrong or cannot be read, and an older one is used",
            float(self.aliases.wrong),
        )
        family = CounterMetricFamily(
            "kogpt2_alias_requests",
            "Requests for an alias, by the model that was chosen",
            labels=["alias", "model"],
        )
        for alias in self.aliases.all():
            for model, count in [*alias.requests.items()]:  # the event loop adds to it
                family.add_metric([alias.name, model], count)
        yield family


class _Counts(Collector):
    """What the entrypoint counts. It outlives the gateway."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir

    def collect(self) -> Iterator[Any]:
        counts = read_counts(self._run_dir)
        family = CounterMetricFamily(
            "kogpt2_process_restarts",
            "Times that a process of the server ended and was started again",
            labels=["process"],
        )
        for name, label in PROCESSES.items():
            family.add_metric([label], counts[name])
        yield family
        yield CounterMetricFamily(
            "kogpt2_dropped_log_lines",
            "Lines of the log that were dropped: what reads it was too slow",
            counts[DROPPED],
        )


COUNTERS = {
    "requests": "Requests that the engine took",
    "tokens": "Tokens made",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts whose keys and values were kept, and not computed again",
    "guessed_tokens": "Guesses of next tokens that were checked",
    "accepted_tokens": "Guesses that were right",
    "steps": "Decoding steps",
    "rows": "Sequences summed over decoding steps; divided by the steps: the mean batch size",
}
HISTOGRAMS = {
    "queue_s": "Time from a request to the beginning of its prompt's computation",
    "time_to_first_token_s": "Time from a request to its first token",
}
GAUGES = {
    "weight_bytes": "Bytes of weights",
    "kv_bytes": "Bytes of keys and values",
    "prefix_bytes": "Bytes of keys and values kept for prompts that begin alike",
    "running": "Sequences in the running batch",
}


class _EngineStatistics(Collector):
    """The engine's own counters, as it gave them for this scrape, and who waits for it."""

    def __init__(self) -> None:
        self.statistics: dict[str, Any] | None = None
        self.names: dict[str, str] = {}
        self.waiting: Mapping[str, int] = {}

    def collect(self) -> Iterator[Any]:
        up = GaugeMetricFamily("kogpt2_engine_up", "Whether the engine answers")
        up.add_metric([], float(self.statistics is not None))
        yield up
        yield self._waiting()
        if self.statistics is None:
            return
        for name, text in (
            ("budget_bytes", "The engine's memory budget"),
            ("weight_bytes", "Of the budget, taken by weights"),
            ("kv_bytes", "Of the budget, reserved for running requests"),
            ("prefix_bytes", "Of what is left, kept for prompts that begin alike"),
        ):
            yield GaugeMetricFamily(f"kogpt2_engine_{name}", text, self.statistics[name])
        models = self.statistics["models"]
        yield GaugeMetricFamily("kogpt2_models", "Models that the engine holds", len(models))
        where: Any = GaugeMetricFamily(
            "kogpt2_model_residency",
            "1 for where a model's weights are: hot or parked",
            labels=["model", "residency"],
        )
        for model in models:
            where.add_metric([self.names.get(model["name"], model["name"]), model["residency"]], 1)
        yield where
        for families, kind in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, text in families.items():
                family: Any = kind(f"kogpt2_model_{name}", text, labels=["model"])
                for model in models:
                    label = self.names.get(model["name"], model["name"])
                    family.add_metric([label], model[name])
                yield family
        for name, text in HISTOGRAMS.items():
            shown = f"kogpt2_model_{name.removesuffix('_s')}_seconds"
            histogram = HistogramMetricFamily(shown, text, labels=["model"])
            for model in models:
                label = self.names.get(model["name"], model["name"])
                histogram.add_metric([label], model[name]["buckets"], model[name]["sum"])
            yield histogram

    def _waiting(self) -> Any:
        waiting = dict(self.waiting)
        for model in self.statistics["models"] if self.statistics else ():
            name = self.names.get(model["name"], model["name"])
            waiting[name] = waiting.get(name, 0) + model["waiting"]
        family: Any = GaugeMetricFamily(
            "kogpt2_model_waiting",
            "Requests that wait in the gateway, and sequences in the engine's queue",
            labels=["model"],
        )
        for name, count in waiting.items():
            family.add_metric([name], count)
        return family
