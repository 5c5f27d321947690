"""Measured: the engine side by side with others, in rounds, one after the other in each."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import profile, random_model
from benchmarks.contenders.contender import CONTENDERS, Contender
from benchmarks.contenders.systems import INT8, SYSTEMS, System
from benchmarks.engine import process, serving, tables
from benchmarks.process import ROOT, Worker
from benchmarks.run import Results, Run
from benchmarks.server import Server
from command.documents import read_documents
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact

DEMO = ("sowol", "dongju")
BATCH = 8  # the rows of B=8
SETTLE_S = 0.2  # until the thread pools of who was measured before have stopped spinning


@dataclass(frozen=True)
class Plan:
    config: GPT2Config = random_model.FULL
    rounds: int = 5
    prompt_tokens: int = 16
    new_tokens: int = 64
    models: int = 8
    clients: int = 16
    requests_each: int = 3
    overhead_requests: int = 30
    load_tries: int = 5
    texts: int = 24
    bandwidth_floats: int = 128 << 20


PARTS = (
    "bandwidth", "turns", "uses", "speculation", "serving", "loading", "memory", "accuracy",
    "profile",
)  # fmt: skip


class EngineRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 1, 16, 16, 3, 4, 1, 5, 1, 2, 4 << 20)
    DEFAULT = ("contenders", *PARTS)
    PARTS = (*DEFAULT, *(contender.name for contender in CONTENDERS))
    GOALS = tables.GOALS

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        every = [one.name for one in CONTENDERS] if "contenders" in wanted else []
        super().__init__(plan, [*every, *(n for n in wanted if n != "contenders")], workdir)
        rows = max(plan.clients, BATCH)
        self.prompts = random_model.prompts(plan.config, rows, plan.prompt_tokens)
        self.texts = [random_model.text_of(prompt) for prompt in self.prompts]
        self.results["contenders"] = {}
        self._bandwidth: Callable[..., dict[str, float]] | None = None

    def add_to(self, before: Results) -> None:
        """Those that are compared are of one run."""
        super().add_to(before)
        if {*self.wanted} & {one.name for one in CONTENDERS}:
            self.results["contenders"] = {}

    def measure(self, save: Callable[[], object]) -> None:
        self._make_models()
        with ExitStack() as stack:
            turn = self._start(stack)
            rounds = tqdm(total=self.plan.rounds * len(turn), desc="measuring", disable=None)
            for _ in range(self.plan.rounds):
                for name, step in turn:
                    rounds.set_postfix_str(name)
                    time.sleep(SETTLE_S)
                    if name not in self.results["skipped"]:
                        with self.skipping(name):
                            step()
                    rounds.update()
            rounds.close()
        for name in self.results["skipped"]:
            for place in (self.results, self.results["contenders"], self.results.get("uses", {})):
                place.pop(name, None)
        # With the others gone: what they have mapped cannot leave the page cache.
        text, log = self.texts[0], self.log
        alone = {
            "loading": lambda: process.measure_loading(
                self.alone, self.models[0], text, self.plan.load_tries, log("loading")
            ),
            "memory": lambda: process.measure_memory(self.models, text, log("memory")),
            "accuracy": self._accuracy,
            "profile": self._profile,
        }
        self.measure_parts(alone, save)
        self.judge()

    def _make_models(self) -> None:
        """The first in fp32; the others in fp16, which takes half the disk and loads as well."""
        store = self.workdir / "models"  # also the server's model store
        several = {"turns", "memory"} & set(self.wanted)
        self.models = [
            random_model.make(store, self.plan.config, i, "float16" if i else "float32")
            for i in tqdm(
                range(self.plan.models if several else 1), desc="random models", disable=None
            )
        ]
        # Its files must leave the page cache, so nothing else may use it.
        self.alone = random_model.make(store, self.plan.config, 100, "float16")
        self.tiny = random_model.make(store, random_model.TINY, 0)

    def _start(self, stack: ExitStack) -> list[tuple[str, Callable[[], None]]]:
        """Who is measured in a round, in this order, and how; all of them are started."""
        entries: list[tuple[str, Callable[[], None]]] = []

        def start(name: str, how: Callable[[], Callable[[], None]]) -> None:
            if name in self.wanted:
                with self.skipping(name):
                    entries.append((name, how()))

        def worker(name: str, *arguments: str | Path) -> Callable[..., Any]:
            parameters = {"OPENBLAS_NUM_THREADS": "1"} if name == "bandwidth" else {}
            started = Worker(
                sys.executable, f"engine.{name}", arguments, self.log(name), parameters
            )
            stack.enter_context(started)
            rounds: list[Any] = []
            self.results[name] = {**started.about, "rounds": rounds}

            def measure(**options: Any) -> Any:
                rounds.append(started.call("measure", **options))
                return rounds[-1]

            return measure

        def contender(one: Contender) -> Callable[[], None]:
            worker = one.start(self.models[0], self.workdir / "peers", self.log(one.name))
            stack.enter_context(worker)
            rows: Results = {str(rows): {"rounds": []} for rows in one.rows}
            about = {"label": one.label, **worker.about, "rows": rows}
            self.results["contenders"][one.name] = about
            return lambda: self._speed(about, worker)

        def system(one: System) -> Callable[[], None]:
            exports = self.workdir / "peers"
            worker = one.start(self.plan.config, self.models[0], exports, self.logs)
            stack.enter_context(worker)
            rounds: list[Any] = []
            self.results["uses"][one.name] = {"label": one.label, "rounds": rounds}
            return lambda: rounds.append(worker.call("measure", parts=one.parts, **shape_fields))

        if "bandwidth" in self.wanted:
            with self.skipping("bandwidth"):
                self._bandwidth = worker("bandwidth", str(self.plan.bandwidth_floats))
        for one in tqdm(CONTENDERS, desc="starting contenders", disable=None):
            start(one.name, partial(contender, one))
        start("serving", lambda: self._serving(stack))
        parameters = {"prompts": self.prompts[:BATCH], "new_tokens": self.plan.new_tokens}
        start("turns", lambda: partial(worker("turns", *INT8, *self.models), **parameters))
        plan, shape = self.plan, self.plan.config
        start("speculation", lambda: self._speculation(worker))
        shape_fields = {"vocab_size": shape.vocab_size, "max_length": shape.max_length}
        shape_fields |= {"prompt_tokens": plan.prompt_tokens, "new_tokens": plan.new_tokens}
        if "uses" in self.wanted:
            self.results["uses"] = {}
            for each in SYSTEMS:
                self.results["skipped"].pop(each.name, None)
            for each in tqdm(SYSTEMS, desc="starting systems", disable=None):
                with self.skipping(each.name):
                    entries.append((each.name, system(each)))
        return entries

    def _speed(self, entries: Results, worker: Worker) -> None:
        for rows, measured in entries["rows"].items():
            around = [self._read_rate()] if rows == "1" else []
            answer = worker.call(
                "generate", prompts=self.prompts[: int(rows)], new_tokens=self.plan.new_tokens
            )
            around += [self._read_rate()] if rows == "1" else []
            steps = answer["steps_s"]
            measured["rounds"].append(
                {
                    "seconds": sum(steps),
                    "first_token_s": steps[0],
                    "step_s": statistics.median(steps[1:]),
                    "read_bytes_per_s": [rate for rate in around if rate],
                }
            )
            entries.setdefault("ids", answer["ids"][0])

    def _profile(self) -> Results:
        artifact = open_artifact(self.models[0])
        return {
            "steps": profile.measured(artifact, "int8", (1, BATCH)),
            "read_bytes": profile.weight_bytes(artifact, "int8"),
        }

    def _read_rate(self) -> float:
        """Bytes per second that the cores read now; 0 if it is not among what is measured."""
        if self._bandwidth is None:
            return 0.0
        time.sleep(SETTLE_S)
        rate = max(self._bandwidth().values())
        time.sleep(SETTLE_S)
        return float(rate)

    def _speculation(self, worker: Callable[..., Callable[..., Any]]) -> Callable[[], None]:
        plan = self.plan
        sizes = map(str, (plan.config.vocab_size, plan.prompt_tokens, plan.new_tokens))
        return partial(worker("speculation", self.models[0], *sizes), rows=(1,))

    def _serving(self, stack: ExitStack) -> Callable[[], None]:
        plan, models = self.plan, {"full": self.models[0], "tiny": self.tiny}
        server = stack.enter_context(Server(self.tiny.parent, self.log("serving"), models))
        rounds: list[Any] = []
        self.results["serving"] = {"clients": plan.clients, "rounds": rounds}
        clients = (self.texts[: plan.clients], plan.requests_each, plan.new_tokens)
        return lambda: rounds.append(
            {
                "tokens_per_s": serving.throughput(server, "full", *clients),
                **{
                    f"overhead_{name}_ms": serving.overhead_ms(
                        server, name, self.texts[0], plan.overhead_requests
                    )
                    for name in models
                },
            }
        )

    def _accuracy(self) -> Results:
        with Worker(sys.executable, "engine.accuracy", [], self.log("accuracy")) as worker:
            return {
                name: worker.call(
                    "compare",
                    folder=str(folder),
                    backend="native",
                    precision="int8",
                    prompts=prompts,
                    new_tokens=self.plan.new_tokens,
                )
                for name, folder, prompts in self._accuracy_cases()
            }

    def _accuracy_cases(self) -> Iterator[tuple[str, Path, list[Any]]]:
        yield "random", self.models[0], self.prompts[:BATCH]
        for name in DEMO:
            documents = read_documents(ROOT / "model_store" / "corpus" / f"{name}.txt")
            lines = sorted({line for document in documents for line in document[:-1]})
            some = lines[:: max(len(lines) // self.plan.texts, 1)][: self.plan.texts]
            yield name, random_model.demo(name, self.workdir / "demo"), some

    def lines(self) -> str:
        return tables.lines(self.results)
