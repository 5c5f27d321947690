"""A benchmark run: the parts measured, the parts skipped with their reasons, and the goals."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tqdm import tqdm

from benchmarks.report.tables import Goal, Results, judge
from command.errors import Problem
from common.errors import EngineError
from testbed import machine, random_model
from testbed.process import ROOT, ProgramError

K = TypeVar("K")
V = TypeVar("V")
PREPARATION = "preparation"  # key in `skipped` if `prepare` fails


class Run:
    """Measures the parts named in `wanted`. `results["skipped"]` has why others failed, by name.

    plan: a dataclass with the sizes of the run: `PLAN`, or with --quick `QUICK`, which takes
    some seconds on tiny models and shows that everything runs, not how fast
    """

    PLAN: ClassVar[Any]
    QUICK: ClassVar[Any]
    PARTS: ClassVar[tuple[str, ...]]  # in order; each is measured by the method of this name
    DEFAULT: ClassVar[tuple[str, ...]]  # the parts that are measured without --only
    GOALS: Sequence[Goal]
    LINES: ClassVar[Callable[[Results], str]]  # formats the results as a page

    def __init__(self, plan: Any, wanted: Sequence[str], workdir: Path) -> None:
        self.plan, self.wanted = plan, wanted
        self.workdir, self.logs, self.store = workdir, workdir / "logs", workdir / "models"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.results: Results = {
            "machine": machine.describe(),
            "commit": machine.commit(ROOT),
            "plan": dataclasses.asdict(plan),
            "wanted": list(wanted),
            "skipped": {},
        }

    def add_to(self, before: Results) -> None:
        """Continue an earlier run. Raises `Problem` if its commit or plan is different."""
        for key in ("commit", "plan"):
            if json.dumps(before[key]) != json.dumps(self.results[key]):
                raise Problem(f"--add: its {key} is {before[key]}, must be {self.results[key]}")
        again = {*self.wanted, PREPARATION}
        self.results = {
            **before,
            "wanted": [*dict.fromkeys([*before["wanted"], *self.wanted])],
            "skipped": {n: why for n, why in before["skipped"].items() if n not in again},
        }

    def measure(self, save: Callable[[], object]) -> None:
        """Measure the wanted parts; call `save` after each, because a run may take long."""
        with contextlib.ExitStack() as self.opened:
            with self.skipping(PREPARATION):
                self.prepare()
            some = [] if PREPARATION in self.results["skipped"] else [*self.parts()]
            for name in tqdm(some, desc="measuring", disable=None):
                with self.skipping(name):
                    self.results[name] = getattr(self, name)()
                self.judge()
                save()
        self.judge()

    def prepare(self) -> None:
        """Make the models and servers of the parts; `self.opened` closes after the last part."""

    @cached_property
    def tiny(self) -> Path:
        return random_model.make(self.store, random_model.TINY, 0)

    @cached_property
    def text(self) -> str:
        """A prompt of 16 tokens for all models; full-size ones have all pieces of the tiny one."""
        return random_model.text_of(random_model.prompts(random_model.TINY, 1, 16)[0])

    def parts(self) -> Iterable[str]:
        return (name for name in self.PARTS if name in self.wanted)

    def judge(self) -> None:
        self.results["goals"] = [*judge(self.results, self.GOALS)]

    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace('/', '_')}.log"

    @contextlib.contextmanager
    def skipping(self, name: str) -> Iterator[None]:
        """Print a failure and record it as `skipped` under `name`, instead of raising it."""
        try:
            yield
        except (ProgramError, EngineError, OSError, http.client.HTTPException) as error:
            self.results["skipped"][name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)


def in_turns(ways: Mapping[K, Callable[[], V]], rounds: int, warm_up: int = 0) -> dict[K, list[V]]:
    """Call each function once per round, in turn; return its results by name.

    Results of the first `warm_up` rounds are discarded.
    """
    results: dict[K, list[V]] = {name: [] for name in ways}
    for number in tqdm(range(warm_up + rounds), leave=False, disable=None):
        for name, way in ways.items():
            result = way()
            if number >= warm_up:
                results[name].append(result)
    return results


def seconds_of(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
