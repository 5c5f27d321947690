"""What others count, as Prometheus takes it: tokens, aliases, the entrypoint and the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from serving.aliases import Aliases
from serving.process.counts import DROPPED, PROCESSES, read_counts
from serving.tokens import Token

USAGE = {
    "requests": "Requests with a token of TOKENS_FILE, those refused included",
    "prompt_tokens": "Tokens of the prompts of its answers",
    "completion_tokens": "Tokens made for its answers",
}


class TokenUsage(Collector):
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


class AliasRequests(Collector):
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


class EntrypointCounts(Collector):
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


class EngineStatistics(Collector):
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
