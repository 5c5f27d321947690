"""Measures classifiers: beside peers, over HTTP, as adapters, by lines, beside generators."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.classifiers import gaps, tables
from benchmarks.contenders import peers
from benchmarks.gateway import batch
from benchmarks.process import Worker
from benchmarks.report.tables import Results
from benchmarks.run import Run, in_turns
from benchmarks.worker import at_once
from engine.artifacts.config import GPT2Config
from testbed import classifiers, random_model
from testbed.server import Server, call

BATCHES = (64, 16, 8)  # texts of a peer's pass, of which the fastest is measured
WHOLE, TINY = "classifier", "tiny-classifier"  # names of models


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement of classifiers.

    heads: adapters with a head of their own
    callers: clients over HTTP, each with one text at a time
    lines: lines of a batch
    listed: texts of a list beside generators
    gaps_s: seconds of each measurement of token gaps
    """

    config: GPT2Config = random_model.FULL
    rounds: int = 5
    texts: int = 64
    tokens: int = 50
    heads: int = 8
    callers: int = 16
    lines: int = 20_000
    listed: int = 1000
    gaps_s: float = 10
    gap_rounds: int = 3
    new_tokens: int = 900


class ClassifiersRun(Run):
    plan: Plan
    PLAN = Plan()
    QUICK = Plan(random_model.TINY, 1, 8, 10, 2, 2, 200, 50, 0.5, 1, 60)
    PARTS = DEFAULT = ("speeds", "lines", "gaps")
    GOALS = tables.GOALS
    LINES = tables.lines

    def prepare(self) -> None:
        plan = self.plan
        kind = f"{plan.config.num_layers}x{plan.config.units}"
        self.classifiers = self.workdir / f"classifiers-{kind}"
        self.exports = self.workdir / "peers" / self.classifiers.name
        self.classifiers.mkdir(exist_ok=True)
        self.whole = self._whole(random_model.make(self.store, plan.config, 0), WHOLE)
        self._whole(self.tiny, TINY)
        self.base = self.classifiers / "base"
        if not self.base.exists():
            random_model.copy(random_model.make(self.store, plan.config, 0), self.base)
        self.adapters = [
            classifiers.make_adapter(self.base, self.classifiers / f"adapter-{i}", plan.config, i)
            for i in range(plan.heads)
        ]

    def _whole(self, artifact: Path, name: str) -> Path:
        trunk = peers.export("transformers", artifact, self.exports, self.log("export"))
        return classifiers.make(trunk, self.classifiers / name)

    @cached_property
    def server(self) -> Server:
        names = [WHOLE, TINY, self.base.name, self.adapters[0].name]
        models = {name: self.classifiers / name for name in names}
        server = Server(self.classifiers, self.log("classifiers"), models)
        return self.opened.enter_context(server)

    # Texts at once, in turns with peers

    def speeds(self) -> Results:
        """Measure texts a second, round by round, and keep the logits of each round's texts."""
        ways: dict[str, Callable[[], Results]] = {}
        with contextlib.ExitStack() as opened:
            for name in tables.PEERS:
                with self.skipping(name):
                    ways[name] = self._way_of_peer(name, opened)
            exact, int8 = (self._ours(precision, opened) for precision in ("fp32", "int8"))
            every = self.plan.heads
            ways |= {
                "fp32": self._way(lambda texts: exact.call("classify", texts=texts, adapters=0)),
                "int8": self._way(lambda texts: int8.call("classify", texts=texts, adapters=0)),
                "adapter": self._way(lambda texts: int8.call("classify", texts=texts, adapters=1)),
                "adapters": self._way(
                    lambda texts: int8.call("classify", texts=texts, adapters=every)
                ),
                "http": self._way(self._over_http),
            }
            return in_turns(ways, self.plan.rounds, 1)

    def _ours(self, precision: str, opened: contextlib.ExitStack) -> Worker:
        """Start our engine with a classifier, in int8 with the base and its adapters, too."""
        folders = [self.base, *self.adapters] if precision == "int8" else []
        given: list[Path | str] = [Worker.backend, precision, self.whole, *folders]
        log = self.log(f"classifiers-{precision}")
        worker = Worker(sys.executable, "contenders.our_classifiers", given, log)
        return opened.enter_context(worker)

    def _way_of_peer(self, name: str, opened: contextlib.ExitStack) -> Callable[[], Results]:
        """Start a peer and return its way, with the number of texts a pass that suits it best."""
        log = self.log(f"classifiers-{name}")
        started = peers.start(name, "classifiers", self.whole, [name], self.exports, log)
        worker = opened.enter_context(started)

        def classify(rows: int, ids: list[list[int]]) -> Any:
            return worker.call("classify", ids=ids, rows=rows)

        ways = {rows: self._way(partial(classify, rows), of_ids=True) for rows in BATCHES}
        tried = in_turns(ways, 1)
        rows = min(BATCHES, key=lambda rows: tried[rows][0]["seconds"])
        return self._way(partial(classify, rows), of_ids=True)

    def _way(self, classify: Callable[[Any], Any], of_ids: bool = False) -> Callable[[], Results]:
        """Return a function that classifies other texts in each round, or their ids."""
        rounds = itertools.count()

        def way() -> Results:
            ids = self._ids(next(rounds), self.plan.texts)
            texts: Any = ids if of_ids else [*map(random_model.text_of, ids)]
            began = time.perf_counter()
            logits = classify(texts)
            return {"seconds": time.perf_counter() - began, "logits": logits}

        return way

    def _ids(self, number: int, count: int) -> list[list[int]]:
        """Return texts of `plan.tokens` ids, `<s>` first."""
        rng = np.random.default_rng(number)
        begin, end = len(random_model.SPECIAL), self.plan.config.vocab_size
        ids = rng.integers(begin, end, (count, self.plan.tokens))
        ids[:, 0] = random_model.BOS
        made: list[list[int]] = ids.tolist()
        return made

    def _over_http(self, texts: list[str]) -> list[list[float]]:
        """Classify each text by a request of its own, from several clients at once."""
        numbers = itertools.count()

        def client(_: int) -> None:
            with contextlib.closing(self.server.connect()) as connection:
                while (at := next(numbers)) < len(texts):
                    call(connection, f"/predictions/{WHOLE}", {"inputs": texts[at]})

        at_once(self.plan.callers, client, range(self.plan.callers))
        return []

    # One server

    def lines(self) -> Results:
        body = {"inputs": self.text}
        return batch.measure(self.server, TINY, body, b'"label"', self.plan.lines)

    def gaps(self) -> Results:
        """Measure seconds between the tokens of streams, alone and beside a list, in turns.

        The list is for an adapter of the streams' model, or for a model of its own.
        """
        ids = self._ids(0, self.plan.listed)
        case = gaps.Case(
            server=self.server,
            generator=self.base.name,
            prompt=self.text,
            texts=[*map(random_model.text_of, ids)],
            new_tokens=self.plan.new_tokens,
            seconds=self.plan.gaps_s,
        )
        beside = {"alone": None, "adapter": self.adapters[0].name, "whole": WHOLE}
        ways = {name: partial(gaps.measure, case, model) for name, model in beside.items()}
        return in_turns(ways, self.plan.gap_rounds)
