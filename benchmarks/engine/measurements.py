"""Measures the engine and its peers in rounds, each of them once in every round."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import profile
from benchmarks.contenders import peers
from benchmarks.contenders.contender import CONTENDERS, SYSTEMS, Contender
from benchmarks.contenders.llama_server import LlamaServer
from benchmarks.engine import accuracy, loading, tables
from benchmarks.engine.uses import ROWS, SAMPLED, Ask, measurement
from benchmarks.process import Worker
from benchmarks.report.tables import Results
from benchmarks.run import Run
from command.documents import read_documents
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from engine.guesses import FEWEST
from testbed import random_model
from testbed.process import ROOT
from testbed.server import Server, Streamed, ask

DEMO = ("sowol", "dongju")
BATCH = 8  # rows
LONG = 900  # tokens behind each row of a step with long contexts
OVERHEAD_TOKENS = 16
ALONE = ("loading", "memory", "accuracy", "profile")

Step = Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement of the engine.

    settle_s: pause before each measurement, in which earlier thread pools stop spinning
    pause_s: pause between two turns of a chat, shorter than a person's
    """

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
    settle_s: float = 0.2
    pause_s: float = 0.3


class EngineRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 1, 16, 16, 3, 4, 1, 5, 1, 2, 4 << 20, 0, 0)
    DEFAULT = ("contenders", "bandwidth", "turns", "uses", "speculation", "serving", *ALONE)
    PARTS = (*DEFAULT, *(contender.name for contender in CONTENDERS))
    GOALS = tables.GOALS
    LINES = tables.lines

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        every = [one.name for one in CONTENDERS] if "contenders" in wanted else []
        super().__init__(plan, [*every, *(n for n in wanted if n != "contenders")], workdir)
        self.prompts = random_model.prompts(
            plan.config, max(plan.clients, BATCH), plan.prompt_tokens
        )
        self.texts = [random_model.text_of(prompt) for prompt in self.prompts]
        self.results["contenders"] = {}
        self._bandwidth: Callable[[], float] | None = None
        self._workers: dict[str, tuple[Worker, Results]] = {}

    def add_to(self, before: Results) -> None:
        """Continue an earlier run, but drop its contenders if any is measured again."""
        super().add_to(before)
        if {*self.wanted} & {one.name for one in CONTENDERS}:
            self.results["contenders"] = {}

    def prepare(self) -> None:
        """Measure what is compared, in rounds; the parts of `ALONE` follow without contenders."""
        several = {"turns", "memory"} & set(self.wanted)
        count = self.plan.models if several else 1
        # The first model is in fp32; fp16 takes half the disk.
        self.models = [
            random_model.make(self.store, self.plan.config, i, "float16" if i else "float32")
            for i in tqdm(range(count), desc="random models", disable=None)
        ]
        # Used by `loading` only, because its files must leave the page cache.
        self.alone = random_model.make(self.store, self.plan.config, 100, "float16")
        with contextlib.ExitStack() as started:
            steps = self._start(started)
            for name, step in tqdm([*steps.items()] * self.plan.rounds, "measuring", disable=None):
                time.sleep(self.plan.settle_s)
                if name not in self.results["skipped"]:
                    with self.skipping(name):
                        step()
        for name in self.results["skipped"]:
            for place in (self.results, self.results["contenders"], self.results.get("uses", {})):
                place.pop(name, None)

    def parts(self) -> Iterator[str]:
        return (name for name in ALONE if name in self.wanted)

    # In rounds

    def _start(self, started: contextlib.ExitStack) -> dict[str, Step]:
        """Start what is measured in rounds; return the steps of a round in order, by name."""
        how: dict[str, Callable[[contextlib.ExitStack], Step | None]] = {
            "bandwidth": self._start_bandwidth,
            **{one.name: partial(self._start_contender, one) for one in CONTENDERS},
            "serving": self._start_serving,
            "turns": self._start_turns,
            "speculation": self._start_speculation,
        }
        how = {name: start for name, start in how.items() if name in self.wanted}
        if "uses" in self.wanted:
            self.results["uses"] = {}
            for one in SYSTEMS:
                self.results["skipped"].pop(one.name, None)
                how[one.name] = partial(self._start_system, one)
        steps: dict[str, Step] = {}
        for name, start in tqdm(how.items(), desc="starting", disable=None):
            with self.skipping(name):
                if step := start(started):
                    steps[name] = step
        for name, (worker, about) in self._workers.items():  # waits until all are ready
            with self.skipping(name):
                about |= worker.about
        return steps

    def _worker(
        self, started: contextlib.ExitStack, name: str, worker: Worker, about: Results | None = None
    ) -> Callable[..., Any]:
        """Return a worker's `call`. `about` receives the worker's description once it is ready."""
        self._workers[name] = (started.enter_context(worker), {} if about is None else about)
        return worker.call

    def _start_bandwidth(self, started: contextlib.ExitStack) -> None:
        """Start measuring bandwidth, before and after each contender's run of one row."""
        size, one_thread = str(self.plan.bandwidth_floats), {"OPENBLAS_NUM_THREADS": "1"}
        log = self.log("bandwidth")
        worker = Worker(sys.executable, "engine.bandwidth", [size], log, one_thread)
        step = _rounds(self.results, "bandwidth", partial(worker.call, "measure"))
        self._worker(started, "bandwidth", worker, self.results["bandwidth"])

        def measure() -> float:
            time.sleep(self.plan.settle_s)
            step()
            time.sleep(self.plan.settle_s)
            return float(max(self.results["bandwidth"]["rounds"][-1].values()))

        self._bandwidth = measure

    def _start_contender(self, one: Contender, started: contextlib.ExitStack) -> Step:
        worker = one.start(self.models[0], self.workdir / "peers", self.log(one.name))
        about: Results = {"label": one.label, "rows": {str(n): {"rounds": []} for n in one.rows}}
        self.results["contenders"][one.name] = about
        call = self._worker(started, one.name, worker, about)
        return lambda: self._speed(about, call)

    def _speed(self, about: Results, call: Callable[..., Any]) -> None:
        for rows, measured in about["rows"].items():
            read = self._bandwidth if rows == "1" else None
            before = [read()] if read else []
            prompts = self.prompts[: int(rows)]
            answer = call("generate", prompts=prompts, new_tokens=self.plan.new_tokens)
            after = [read()] if read else []
            steps = answer["steps_s"]
            measured["rounds"].append(
                {
                    "seconds": sum(steps),
                    "first_token_s": steps[0],
                    "step_s": statistics.median(steps[1:]),
                    "read_bytes_per_s": [*before, *after],
                }
            )
            about.setdefault("ids", answer["ids"][0])

    def _start_engine(self, started: contextlib.ExitStack, name: str, *arguments: Any) -> Step:
        """Start an engine in a process of its own; return its command `name` as a step."""
        log, options = self.log(name), {"prompts": self.prompts[:BATCH]}
        worker = Worker(sys.executable, "contenders.our_engine", arguments, log)
        call = self._worker(started, name, worker)
        return partial(call, name, new_tokens=self.plan.new_tokens, **options)

    def _start_turns(self, started: contextlib.ExitStack) -> Step:
        settings = (f"backend={Worker.backend}", "precision=int8")
        step = self._start_engine(started, "turns", *settings, *self.models)
        return _rounds(self.results, "turns", step, models=len(self.models))

    def _start_speculation(self, started: contextlib.ExitStack) -> Step:
        settings = ("backend=native", "precision=int8", "prefix_cache_mib=0", "speculation=auto")
        step = self._start_engine(started, "speculation", *settings, self.models[0])
        return _rounds(self.results, "speculation", step, guesses=FEWEST)

    def _start_system(self, one: Contender, started: contextlib.ExitStack) -> Step:
        model, exports, log = self.models[0], self.workdir / "peers", self.log(one.name)
        config, plan = self.plan.config, self.plan
        if one.name == "server":
            server = started.enter_context(Server(self.store, log, {"m": model}))
            measure = measurement(_ask(server, {"do_sample": True}, "num_return_sequences"))
        elif one.name == "llama-server":
            peers.python("llama.cpp")
            file = peers.export("llama.cpp", model, exports, log)
            options = {"model": file, "parallel": ROWS, "ctx-size": ROWS * config.max_length}
            llama = started.enter_context(LlamaServer(options, log))
            measure = measurement(_ask(llama, {"min_p": 0}, "n_cmpl"))
        else:
            worker = one.start(model, exports, log)
            measure = partial(self._worker(started, one.name, worker), "measure")
        sizes = {"vocab_size": config.vocab_size, "max_length": config.max_length}
        sizes |= {"prompt_tokens": plan.prompt_tokens, "new_tokens": plan.new_tokens}
        step = partial(measure, parts=one.parts, pause_s=plan.pause_s, **sizes)
        return _rounds(self.results["uses"], one.name, step, label=one.label)

    def _start_serving(self, started: contextlib.ExitStack) -> Step:
        models = {"full": self.models[0], "tiny": self.tiny}
        server = started.enter_context(Server(self.store, self.log("serving"), models))

        def measure() -> Results:
            overhead = {f"overhead_{name}_ms": self._overhead_ms(server, name) for name in models}
            return {"tokens_per_s": self._throughput(server), **overhead}

        return _rounds(self.results, "serving", measure, clients=self.plan.clients)

    def _throughput(self, server: Server) -> float:
        """Return tokens per second of clients that send a request after each answer."""
        plan = self.plan
        texts = self.texts[: plan.clients]
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(plan.clients) as clients:
            connections = [stack.enter_context(contextlib.closing(server.connect())) for _ in texts]

            def tokens(count: int, new_tokens: int) -> int:
                def client(connection: Any, text: str) -> int:
                    answers = [ask(connection, "full", text, new_tokens) for _ in range(count)]
                    return sum(answer["tokens"] for _, answer in answers)

                return sum(clients.map(client, connections, texts))

            tokens(1, 2)
            began = time.perf_counter()
            return tokens(plan.requests_each, plan.new_tokens) / (time.perf_counter() - began)

    def _overhead_ms(self, server: Server, name: str) -> float:
        """Return the median milliseconds of sequential requests outside the engine."""
        with contextlib.closing(server.connect()) as connection:
            ask(connection, name, self.texts[0], OVERHEAD_TOKENS)
            answers = [
                ask(connection, name, self.texts[0], OVERHEAD_TOKENS)
                for _ in range(self.plan.overhead_requests)
            ]
        return 1000 * statistics.median(took - float(answer["seconds"]) for took, answer in answers)

    # Measured after the contenders: files that they map cannot leave the page cache.

    def loading(self) -> Results:
        tries, log = self.plan.load_tries, self.log("loading")
        return loading.measure_loading(self.alone, self.models[0], self.texts[0], tries, log)

    def memory(self) -> Results:
        return loading.measure_memory(self.models, self.texts[0], self.log("memory"))

    def accuracy(self) -> Results:
        """Compare int8 with fp32, on random ids and on lines of the demo models' training texts."""
        cases: dict[str, tuple[Path, Sequence[Any]]] = {
            "random": (self.models[0], self.prompts[:BATCH])
        }
        for name in DEMO:
            documents = read_documents(ROOT / "model_store" / "corpus" / f"{name}.txt")
            lines = sorted({line for document in documents for line in document[:-1]})
            some = lines[:: max(len(lines) // self.plan.texts, 1)][: self.plan.texts]
            cases[name] = (random_model.demo(name, self.workdir / "demo"), some)
        return {
            name: accuracy.compare(str(folder), prompts, self.plan.new_tokens)
            for name, (folder, prompts) in cases.items()
        }

    def profile(self) -> Results:
        artifact = open_artifact(self.models[0])
        behind = min(LONG, profile.most_behind(artifact))
        return {
            **profile.measured(artifact, "int8", (1, BATCH)),
            **profile.measured(artifact, "int8", (BATCH,), behind),  # last: a goal reads this case
        }


def _rounds(results: Results, name: str, measure: Callable[..., Any], **about: Any) -> Step:
    """Return a step that calls `measure` and appends the result to the rounds of `name`."""
    rounds: list[Any] = []
    results[name] = {**about, "rounds": rounds}
    return lambda: rounds.append(measure())


def _ask(server: Server | LlamaServer, sampling: Results, count: str) -> Ask:
    """Return an `Ask` with a connection per request; `count` names its number of answers."""

    def send(ids: list[int], new_tokens: int, sampled: bool = False, answers: int = 1) -> Streamed:
        parameters = {**SAMPLED, **sampling, "seed": 1} if sampled else {}
        path, body = server.stream("m", ids, new_tokens, **{count: answers}, **parameters)
        with contextlib.closing(server.connect()) as connection:
            return Streamed(connection, path, body)

    return send
