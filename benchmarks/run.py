"""A run: parts that are measured, what could not be and why, and the goals."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from benchmarks.process import ROOT, BenchmarkError
from benchmarks.report import goals, machine
from command.errors import Problem
from common.errors import EngineError

Results = dict[str, Any]


class Run:
    """Measures what `wanted` names. What cannot be is in `results["skipped"]`, and why.

    plan: a dataclass with the sizes of the run: `PLAN`, or with --quick `QUICK`, which takes
    some seconds on tiny models and shows that everything runs, not how fast
    """

    PLAN: ClassVar[Any]
    QUICK: ClassVar[Any]
    PARTS: ClassVar[tuple[str, ...]]
    DEFAULT: ClassVar[tuple[str, ...]]  # of `PARTS`
    GOALS: Sequence[goals.Goal]

    def __init__(self, plan: Any, wanted: Sequence[str], workdir: Path) -> None:
        self.plan, self.wanted = plan, wanted
        self.workdir, self.logs = workdir, workdir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.results: Results = {
            "machine": machine.describe(),
            "commit": commit(ROOT),
            "plan": dataclasses.asdict(plan),
            "wanted": list(wanted),
            "skipped": {},
        }

    def add_to(self, before: Results) -> None:
        """Goes on with the results of a run of the same commit and plan. Raises `Problem`."""
        for key in ("commit", "plan"):
            if json.dumps(before[key]) != json.dumps(self.results[key]):
                raise Problem(f"--add: {key} was {before[key]}, is {self.results[key]}")
        self.results = {
            **before,
            "wanted": [*dict.fromkeys([*before["wanted"], *self.wanted])],
            "skipped": {n: why for n, why in before["skipped"].items() if n not in self.wanted},
        }

    def measure(self, save: Callable[[], object]) -> None:
        """`save` is called after each part."""
        raise NotImplementedError

    def lines(self) -> str:
        raise NotImplementedError

    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace('/', '_')}.log"

    def judge(self) -> None:
        self.results["goals"] = list(goals.goals(self.results, self.GOALS))

    def measure_parts(
        self, parts: Mapping[str, Callable[[], Any]], save: Callable[[], object] = lambda: None
    ) -> None:
        """Those that are wanted, one after the other; `save` after each, for it may take long."""
        wanted = [name for name in parts if name in self.wanted]
        for name in tqdm(wanted, desc="measuring", disable=None):
            with self.skipping(name):
                self.results[name] = parts[name]()
            self.judge()
            save()

    @contextlib.contextmanager
    def skipping(self, name: str) -> Iterator[None]:
        """Goes on without what fails, and says so."""
        try:
            yield
        except (BenchmarkError, EngineError, OSError, http.client.HTTPException) as error:
            self.results["skipped"][name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)


def commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "no git"
