"""Exports counts of tokens, aliases, the entrypoint and the engine to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from serving.aliases import Aliases
from serving.process.counts import DROPPED, PROCESSES, read_counts
from serving.tokens import Token

USAGE = {
    "requests": "Requests with a token of TOKENS_FILE, those refused included",
    "prompt_tokens": "Tokens of the prompts of its answers",
    "completion_tokens": "Tokens made for its answers",
}
BUDGET = {
    "budget_bytes": "The engine's memory budget",
    "weight_bytes": "Of the budget, taken by weights",
    "kv_bytes": "Of the budget, reserved for running requests",
    "prefix_bytes": "Of what is left, kept for prompts that begin alike",
}
COUNTERS = {
    "requests": "Requests that the engine took",
    "tokens": "Tokens made",
    "texts": "Texts classified",
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

Rows = Iterable[tuple[Sequence[str], float]]  # values of the labels, and of the metric


@dataclass(frozen=True)
class Scrape:
    """The counts that other parts of the server make, collected for one scrape.

    run_dir: the folder of the entrypoint's counts, which outlive the gateway
    statistics: the engine's own counters; None if it does not answer
    names: names of models, by their names in the engine
    waiting: requests queued in the gateway, by model
    tokens: the tokens of TOKENS_FILE
    aliases: the store's aliases

    Only names of existing tokens, aliases and models become labels.
    """

    run_dir: Path | None
    statistics: dict[str, Any] | None
    names: Mapping[str, str]
    waiting: Mapping[str, int]
    tokens: Sequence[Token]
    aliases: Aliases

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._usage()
        yield from self._aliases()
        counts = read_counts(self.run_dir)
        restarts = (([label], counts[name]) for name, label in PROCESSES.items())
        text = "Times that a process of the server ended and was started again"
        yield _counter("process_restarts", text, ["process"], restarts)
        text = "Lines of the log that were dropped: what reads it was too slow"
        yield _counter("dropped_log_lines", text, [], [([], counts[DROPPED])])

    def _usage(self) -> Iterator[Metric]:
        for name, text in USAGE.items():
            used = (([token.name], getattr(token.usage, name)) for token in self.tokens)
            yield _counter(f"token_{name}", text, ["token"], used)
        refused = (
            ([token.name, reason], count)
            for token in self.tokens
            for reason, count in token.usage.refused.items()
        )
        text = "Requests refused: a model not allowed, loading not allowed, or beyond a limit"
        yield _counter("token_refusals", text, ["token", "reason"], refused)

    def _aliases(self) -> Iterator[Metric]:
        aliases = self.aliases.all()
        yield _gauge("aliases", "Aliases in use", [], [([], len(aliases))])
        text = "Whether the store's aliases.json is wrong or unreadable, and an older one is used"
        yield _gauge("aliases_wrong", text, [], [([], self.aliases.wrong)])
        requests = (
            ([alias.name, model], count)
            for alias in aliases
            for model, count in [*alias.requests.items()]  # a copy, as the event loop adds to it
        )
        text = "Requests for an alias, by the model that was chosen"
        yield _counter("alias_requests", text, ["alias", "model"], requests)

    def _engine(self) -> Iterator[Metric]:
        up = self.statistics is not None
        yield _gauge("engine_up", "Whether the engine answers", [], [([], up)])
        models = [
            (self.names.get(model["name"], model["name"]), model)
            for model in (self.statistics or {"models": ()})["models"]
        ]
        waiting = Counter(self.waiting)
        for name, model in models:
            waiting[name] += model["waiting"]
        text = "Requests that wait in the gateway, and sequences in the engine's queue"
        rows = (([name], count) for name, count in waiting.items())
        yield _gauge("model_waiting", text, ["model"], rows)
        if self.statistics is None:
            return
        for name, text in BUDGET.items():
            yield _gauge(f"engine_{name}", text, [], [([], self.statistics[name])])
        yield _gauge("models", "Models that the engine holds", [], [([], len(models))])
        text = "1 for where a model's weights are: hot or parked"
        where = (([name, model["residency"]], 1) for name, model in models)
        yield _gauge("model_residency", text, ["model", "residency"], where)
        for families, make in ((COUNTERS, _counter), (GAUGES, _gauge)):
            for key, text in families.items():
                rows = (([name], model[key]) for name, model in models)
                yield make(f"model_{key}", text, ["model"], rows)
        for key, text in HISTOGRAMS.items():
            shown = f"kogpt2_model_{key.removesuffix('_s')}_seconds"
            histogram = HistogramMetricFamily(shown, text, labels=["model"])
            for name, model in models:
                histogram.add_metric([name], model[key]["buckets"], model[key]["sum"])
            yield histogram


def _counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = CounterMetricFamily(f"kogpt2_{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(f"kogpt2_{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(values, float(number))
    return family
