"""One run: everything measured, round by round, contenders one after the other in each."""

from __future__ import annotations

import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from benchmarks import random_model
from benchmarks.contenders import peers
from benchmarks.contenders.contender import CONTENDERS, Contender
from benchmarks.engine import process as engine_process
from benchmarks.http_server import HTTPServer
from benchmarks.process import ROOT, BenchmarkError, Process
from benchmarks.report import machine
from common.errors import EngineError
from engine.artifacts.config import GPT2Config
from scripts.lib.documents import read_documents

SPEED = tuple(contender.name for contender in CONTENDERS)
PARTS = ("bandwidth", "turns", "prefixes", "serving", "loading", "memory", "accuracy")
DEMO = ("sowol", "dongju")
OVERHEAD_TOKENS = 16
BATCH = 8  # the rows of B=8
SETTLE_S = 0.2  # until the thread pools of who was measured before have stopped spinning

Results = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

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

    @classmethod
    def quick(cls) -> Plan:
        """Some seconds on a tiny model: shows that everything runs, not how fast."""
        return cls(random_model.TINY, 1, 16, 16, 3, 4, 1, 5, 1, 2, 4 << 20)


class Run:
    """Measures what `wanted` names. What cannot be measured is in `results["skipped"]`, and why."""

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        self.plan, self.wanted, self.workdir = plan, wanted, workdir
        self.logs = workdir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.prompts = random_model.prompts(
            plan.config, max(plan.clients, BATCH), plan.prompt_tokens
        )
        self.texts = [random_model.text_of(prompt) for prompt in self.prompts]
        self.results: Results = {
            "machine": machine.describe(),
            "plan": asdict(plan),
            "wanted": list(wanted),
            "contenders": {},
            "skipped": {},
        }
        self._processes: dict[str, Process] = {}
        self._server: HTTPServer | None = None

    def measure(self) -> Results:
        self._make_models()
        try:
            self._start()
            with tqdm(
                total=self.plan.rounds * len(self._turn()), desc="measuring", disable=None
            ) as bar:
                for _ in range(self.plan.rounds):
                    for name, step in self._turn():
                        bar.set_postfix_str(name)
                        time.sleep(SETTLE_S)
                        with self._skipping(name):
                            step()
                        bar.update()
        finally:
            self._close()
        # With the others gone: what they have mapped cannot leave the page cache.
        if "loading" in self.wanted:
            self._alone("loading", self._loading)
        if "memory" in self.wanted:
            self._alone("memory", self._memory)
        if "accuracy" in self.wanted:
            self._alone("accuracy", self._accuracy)
        return self.results

    # Before

    def _make_models(self) -> None:
        """The first in fp32; the others in fp16, which takes half the disk and loads as well."""
        models = self.workdir / "models"  # also the server's model store
        several = {"turns", "memory"} & set(self.wanted)
        count = self.plan.models if several else 1
        self.models = [
            random_model.make(models, self.plan.config, i, "float16" if i else "float32")
            for i in tqdm(range(count), desc="random models", disable=None)
        ]
        # Its files must leave the page cache, so nothing else may use it.
        self.alone = random_model.make(models, self.plan.config, 100, "float16")
        self.tiny = random_model.make(models, random_model.TINY, 0)

    def _start(self) -> None:
        chosen = [c for c in CONTENDERS if c.name in self.wanted]
        for contender in tqdm(chosen, desc="starting contenders", disable=None):
            with self._skipping(contender.name):
                self._start_contender(contender)
        if "bandwidth" in self.wanted:
            with self._skipping("bandwidth"):
                self._processes["bandwidth"] = Process(
                    sys.executable,
                    "engine.bandwidth",
                    [str(self.plan.bandwidth_floats)],
                    self._log("bandwidth"),
                    {"OPENBLAS_NUM_THREADS": "1"},
                )
                self.results["bandwidth"] = {"rounds": []}
        if "turns" in self.wanted:
            with self._skipping("turns"):
                arguments = ["onnxruntime", "int8", *map(str, self.models)]
                self._processes["turns"] = Process(
                    sys.executable, "engine.turns", arguments, self._log("turns")
                )
                self.results["turns"] = {"models": len(self.models), "rounds": []}
        if "prefixes" in self.wanted:
            with self._skipping("prefixes"):
                arguments = ["onnxruntime", "int8", str(self.models[0])]
                self._processes["prefixes"] = Process(
                    sys.executable, "engine.prefixes", arguments, self._log("prefixes")
                )
                self.results["prefixes"] = {"rounds": []}
        if "serving" in self.wanted:
            with self._skipping("serving"):
                models = {"full": self.models[0], "tiny": self.tiny}
                self._server = HTTPServer(models, self._log("serving"))
                self.results["serving"] = {"clients": self.plan.clients, "rounds": []}

    def _start_contender(self, contender: Contender) -> None:
        why_not = peers.missing(contender.name) if contender.peer else None
        if why_not:
            raise BenchmarkError(why_not)
        process = contender.start(self.models[0], self.workdir / "peers", self._log(contender.name))
        self._processes[contender.name] = process
        self.results["contenders"][contender.name] = {
            "label": contender.label,
            **process.about,
            "rows": {str(rows): {"rounds": []} for rows in contender.rows},
        }

    # In each round

    def _turn(self) -> list[tuple[str, Callable[[], None]]]:
        def speed(contender: Contender) -> Callable[[], None]:
            return lambda: self._speed(contender)

        steps: list[tuple[str, Callable[[], None]]] = []
        if "bandwidth" in self._processes:
            steps.append(("bandwidth", self._bandwidth))
        steps += [(c.name, speed(c)) for c in CONTENDERS if c.name in self._processes]
        if self._server is not None:
            steps.append(("serving", self._serving))
        if "turns" in self._processes:
            steps.append(("turns", self._turns))
        if "prefixes" in self._processes:
            steps.append(("prefixes", self._prefixes))
        if "bandwidth" in self._processes:
            steps.append(("bandwidth", self._bandwidth))
        return [(name, step) for name, step in steps if name not in self.results["skipped"]]

    def _speed(self, contender: Contender) -> None:
        found = self.results["contenders"][contender.name]
        for rows in contender.rows:
            answer = self._processes[contender.name].call(
                "generate", prompts=self.prompts[:rows], new_tokens=self.plan.new_tokens
            )
            steps = answer["steps_s"]
            found["rows"][str(rows)]["rounds"].append(
                {
                    "seconds": sum(steps),
                    "first_token_s": steps[0],
                    "step_s": statistics.median(steps[1:]),
                }
            )
            found.setdefault("ids", answer["ids"][0])

    def _bandwidth(self) -> None:
        self.results["bandwidth"]["rounds"].append(self._processes["bandwidth"].call("measure"))

    def _turns(self) -> None:
        new_tokens = self.plan.new_tokens
        found = self._processes["turns"].call(
            "measure", texts=self.texts[:BATCH], new_tokens=new_tokens
        )
        self.results["turns"]["rounds"].append(found)

    def _prefixes(self) -> None:
        self.results["prefixes"]["rounds"].append(self._processes["prefixes"].call("measure"))

    def _serving(self) -> None:
        plan, server = self.plan, self._server
        assert server is not None
        rate = server.throughput(
            "full", self.texts[: plan.clients], plan.requests_each, plan.new_tokens
        )
        overheads = {
            f"overhead_{name}_ms": statistics.median(
                server.overheads_ms(name, self.texts[0], plan.overhead_requests, OVERHEAD_TOKENS)
            )
            for name in ("full", "tiny")
        }
        self.results["serving"]["rounds"].append({"tokens_per_s": rate, **overheads})

    # Alone

    def _loading(self) -> Results:
        return engine_process.measure_loading(
            self.alone, self.models[0], self.texts[0], self.plan.load_tries, self._log("loading")
        )

    def _memory(self) -> Results:
        return engine_process.measure_memory(self.models, self.texts[0], self._log("memory"))

    def _accuracy(self) -> Results:
        found = {}
        process = Process(sys.executable, "engine.accuracy", [], self._log("accuracy"))
        try:
            for name, folder, prompts in self._accuracy_cases():
                found[name] = process.call(
                    "compare",
                    folder=str(folder),
                    prompts=prompts,
                    new_tokens=self.plan.new_tokens,
                )
        finally:
            process.close()
        return found

    def _accuracy_cases(self) -> Iterator[tuple[str, Path, list[Any]]]:
        yield "random", self.models[0], self.prompts[:BATCH]
        for name in DEMO:
            folder = self.workdir / "demo" / name
            with tarfile.open(ROOT / "model_store" / f"{name}.tar.gz") as archive:
                archive.extractall(folder, filter="data")
            documents = read_documents(ROOT / "model_store" / "corpus" / f"{name}.txt")
            lines = sorted({line for document in documents for line in document[:-1]})
            yield name, folder, lines[:: max(len(lines) // self.plan.texts, 1)][: self.plan.texts]

    # All the time

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _alone(self, name: str, measure: Callable[[], Results]) -> None:
        print(f"{name} ...", file=sys.stderr)
        with self._skipping(name):
            self.results[name] = measure()

    @contextmanager
    def _skipping(self, name: str) -> Iterator[None]:
        """Goes on without what fails, and says so."""
        try:
            yield
        except (BenchmarkError, EngineError, requests.RequestException, OSError) as error:
            self.results["skipped"][name] = str(error)
            self.results["contenders"].pop(name, None)
            self.results.pop(name, None)
            if (process := self._processes.pop(name, None)) is not None:
                process.close()

    def _close(self) -> None:
        for process in self._processes.values():
            process.close()
        if self._server is not None:
            self._server.close()
