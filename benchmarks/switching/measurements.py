"""Measures switching between many fine-tunes that do not all fit in memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.contenders import peers
from benchmarks.contenders.llama_server import COMPUTE_ALL_PROMPTS, Router
from benchmarks.engine.loading import Engine, drop_pages
from benchmarks.report.tables import Results
from benchmarks.run import Run
from benchmarks.switching import tables
from benchmarks.switching.clients import Budgeted, Clients, joined
from common.memory import MIB
from common.model_files import DELTA
from engine.artifacts.config import GPT2Config
from engine.budget import budget_bytes
from engine.native import prepared
from testbed import process_tree, random_deltas, random_model
from testbed.control_group import ControlGroup
from testbed.machine import commit
from testbed.process import ROOT, ProgramError
from testbed.process_tree import each_further
from testbed.server import Server
from testbed.trace import Kind, trace

PEER = "llama.cpp"
BEFORE_FIRST_S = 3.0
SMALL = GPT2Config(2_000, 128, 2, 2, 512, 128)
PROMPT_TOKENS = 16
PROMPTS = 2
TRACE = Kind(scans=1, moves=False)
MANY = 20  # with more models, `random_model.hollow` frees the artifacts' disk
SETTLED = 2  # models after which all shared memory is in use
FURTHER = 4  # measured models, without the first, which starts the shared tokenizer process
DISK_MB_S = (50, 100, 200, 400, None)
SERVER_MIB = 720  # of a container's memory, for the server without models
UNLIMITED_MIB = 1 << 20
SWEEP_S = 90.0  # limit of the trace at each size


@dataclass(frozen=True)
class Plan(Budgeted):
    """Sizes of a measurement of switching.

    engine_mib: the engine's budget; five of the default models fit into it in int8
    two_mib: a budget into which two models fit
    minutes: how long the trace runs, instead of `requests`, or 0
    sizes: about how many sizes of memory a sweep has
    zipf: exponent of the models' popularity
    one_base: whether the models are deltas of one base, as folders without weights
    against: another commit to measure
    """

    config: GPT2Config = random_model.FULL
    models: int = 8
    requests: int = 300
    clients: int = 4
    new_tokens: int = 16
    pause_s: float = 0.3
    rounds: int = 2
    engine_mib: int = 720
    two_mib: int = 300
    container_mib: int = 0
    minutes: float = 0
    tries: int = 3
    sizes: int = 8
    seed: int = 0
    zipf: float = 1.0
    one_base: bool = False
    against: str | None = None

    def trace(self, folders: Sequence[Path]) -> list[tuple[str, int]]:
        requests = self.requests
        if self.minutes:  # more than can be sent in that time
            requests = int(self.minutes * 60 * self.clients / self.pause_s)
        turns = trace(self.seed, TRACE._replace(zipf=self.zipf), self.models, requests)
        return [(folders[m].name, i % PROMPTS) for i, m in enumerate(turns)]


@dataclass
class Side:
    """A server to measure, of a commit or a peer, and the texts of each of its models alone."""

    name: str
    start: Callable[..., Any]  # (budget in MiB, name of its log, ...)
    tree: Path = ROOT
    expected: dict[tuple[str, int], str] = field(default_factory=dict)


def by_side(measure: Callable[[SwitchingRun, Side], Any]) -> Callable[[SwitchingRun], Results]:
    """Make a part of a run from a measurement of one side, with results by side."""
    return lambda run: {side.name: measure(run, side) for side in run.sides}


class SwitchingRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(SMALL, 3, 16, 2, 4, 0.01, 1, 3, 2, tries=1, sizes=1)
    PARTS = ("trace", "swaps", "memory", "first", "sweep", "disk", "registered", "models")
    DEFAULT = PARTS[:4]
    LINES = tables.lines

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        super().__init__(plan, wanted, workdir)
        self.many = plan.models > MANY
        if plan.against and self.many:
            raise ProgramError(f"--against takes at most {MANY} models")
        self.GOALS = tables.CONTAINER_GOALS if plan.container_mib else tables.GOALS
        if plan.one_base:
            self.GOALS = tables.DELTA_GOALS
        # Hollow artifacts cannot be prepared again in another format, which the folder names.
        self.tuned = workdir / (f"hollow-{prepared.FORMAT}" if self.many else "tuned")
        if plan.one_base:
            self.tuned = self.tuned.with_name(f"{self.tuned.name}-deltas")
        prompts = random_model.prompts(random_model.TINY, PROMPTS, PROMPT_TOKENS)
        self.clients = Clients(prompts, plan.clients, plan.new_tokens, plan.pause_s)
        self.results["plan"]["budget_mib"] = plan.budget_mib
        self.results["against"] = None

    def prepare(self) -> None:
        self.tuned.mkdir(exist_ok=True)
        self.sides = [self._side("now", ROOT)]
        if against := self.plan.against:
            tree = self.opened.enter_context(_tree(against))
            self.results["against"] = commit(tree)
            self.sides.append(self._side(against, tree))
        for side in self.sides:  # the first run quantizes each model
            with side.start(self.plan.budget_mib, "prepare") as server:
                side.expected = self._alone(server, side.name)
        self.folders = [*self._models(self.plan.models)]
        self.turns = self.plan.trace(self.folders)

    def _side(self, name: str, tree: Path) -> Side:
        def start(
            mib: int, log: str, store: Path = self.tuned, prefix: Sequence[str] = (), **more: str
        ) -> Server:
            environment = {"ENGINE_MEMORY_MIB": str(mib), "ENGINE_CACHE_DIR": "", **more}
            log_file = self.log(f"switching-{log}-{name}")
            return Server(store, log_file, environment=environment, prefix=prefix, root=tree)

        return Side(name, start, tree)

    def _models(self, count: int) -> Iterator[Path]:
        make = random_deltas.make if self.plan.one_base else random_model.fine_tunes
        return make(self.tuned, self.plan.config, count)

    def _alone(self, server: Any, name: str) -> dict[tuple[str, int], str]:
        """Return the texts of each model alone. Many models are hollowed, each after its texts."""
        count = self.plan.models
        answers: dict[str, list[str]] = {}
        for folder in tqdm(self._models(count), f"models alone, {name}", count, disable=None):
            with self.clients.one(server) as client:  # the server closes idle connections
                texts = [client.must(folder.name, prompt).text for prompt in range(PROMPTS)]
            answers[folder.name] = texts
            if self.many:
                random_model.hollow(folder / (DELTA if self.plan.one_base else "kogpt2.params"))
        if len({*map(tuple, answers.values())}) < count:  # hollow artifacts were prepared again
            raise ProgramError(f"{self.tuned} is damaged, models give the same texts: remove it")
        return {
            (model, prompt): text
            for model, texts in answers.items()
            for prompt, text in enumerate(texts)
        }

    # The trace

    def trace(self) -> Results:
        """Run the trace on each side in turn, in rounds."""
        measured: Results = {}
        for number in range(self.plan.rounds):
            for side in itertools.chain(self.sides, self._peer(measured)):
                with self.skipping(side.name):
                    one = self._trace(side, self.plan.budget_mib, f"trace-{number}")
                    measured.setdefault(side.name, []).append(one)
        return {name: joined(rounds) for name, rounds in measured.items()}

    def _peer(self, measured: Results) -> Iterator[Side]:
        """Yield llama.cpp's router, with as many models at once as this server had hot."""
        none = self.plan.container_mib or self.many or PEER in self.results["skipped"]
        if none or "now" not in measured:
            return
        with self.skipping(PEER):
            peers.python(PEER)
            exports, log = self.workdir / "peers", self.log(f"switching-{PEER}")
            for folder in self.folders:
                peers.export(PEER, folder, exports, log)
            at_once = max(one["at_once"] for one in measured["now"])

            def start(mib: int, name: str, **_: Any) -> Router:
                return Router(exports, at_once, self.plan.clients, log)

            with start(0, "prepare") as server:
                expected = self._alone(server, PEER)
            yield Side(PEER, start, expected=expected)

    def _trace(
        self,
        side: Side,
        mib: int,
        log: str,
        container_mib: int = 0,
        seen: bool = True,
        limit_s: float = 0.0,
    ) -> Results:
        container_mib = container_mib or self.plan.container_mib
        limit_s = limit_s or 60 * self.plan.minutes
        if container_mib:
            self._drop_pages()
        with (
            ControlGroup(container_mib, seen=seen) as group,
            side.start(mib, log, prefix=group.prefix, **COMPUTE_ALL_PROMPTS) as server,
        ):
            warm_up = self._warm_up(server)
            expected, turns = side.expected, self.turns
            answers, measured = self.clients.measure(server, turns, expected, limit_s or math.inf)
            measured["usage"] |= group.page_ins()
        return {
            **measured,
            "warm_up": warm_up,
            "requests": [answer.row() for answer in answers],
            "at_once": max(answer.hot for answer in answers),
            "ready_s": server.ready_s,
        }

    def _warm_up(self, server: Any) -> list[str]:
        """Request every model once, the most popular last; return their names in this order."""
        counts = Counter(model for model, _ in self.turns)
        names = sorted((folder.name for folder in self.folders), key=counts.__getitem__)
        with self.clients.one(server) as client:
            for name in names:
                client.ask(name, new_tokens=1)
        return names

    def sweep(self) -> Results:
        """Run the trace with less and less memory, down to that of one model; results by side.

        With containers, a second server has no budget, so that all models stay hot.
        """
        if self.plan.container_mib:
            side = self.sides[0]
            return {side.name: self._sizes(side), tables.ALL_HOT: self._sizes(side, seen=False)}
        return {side.name: self._sizes(side) for side in self.sides}

    def _sizes(self, side: Side, seen: bool = True) -> list[Results]:
        models, whole = self.plan.models, self.plan.container_mib
        each = (whole - SERVER_MIB) / models if whole else self.plan.engine_mib / 5
        measured = []
        for capacity in range(models, 0, -max(models // self.plan.sizes, 1)):
            container = int(SERVER_MIB + each * capacity) if whole else 0
            mib = budget_bytes(container << 20) // MIB if whole else max(int(each * capacity), 1)
            log = f"sweep-{capacity}" + ("" if seen else "-hot")
            one = self._trace(side, mib if seen else UNLIMITED_MIB, log, container, seen, SWEEP_S)
            sizes = {"mib": mib if seen else None, "container_mib": container}
            measured.append({"share": capacity / models, **sizes, **joined([one])})
        return measured

    def _drop_pages(self) -> None:
        for folder in self.folders:
            drop_pages(folder)

    # Alone

    @by_side
    def swaps(self, side: Side) -> Results:
        """Measure calls to models in turn where only two fit, and loads of the engine alone."""
        names = [folder.name for folder in self.folders]
        with side.start(self.plan.two_mib, "swaps") as server, self.clients.one(server) as client:
            for name in names:
                client.ask(name, new_tokens=1)
            before = process_tree.usage(server.pid)["cpu_s"]
            answers = [client.ask(name, new_tokens=1) for name in names * self.plan.tries]
            cpu_s = (process_tree.usage(server.pid)["cpu_s"] - before) / len(answers)
        text = random_model.text_of(self.clients.prompts[0])
        opening, base = [], None
        if self.plan.one_base:
            base = random_model.make(self.tuned, self.plan.config, 0)
        with Engine(self.log("switching-engine"), root=side.tree) as engine:
            for folder in self.folders[:2] * (1 + self.plan.tries):
                opening.append(engine.load("m", folder, base))
                engine.generate("m", text, 1)
                engine.unload("m")
        return {
            "requests": [answer.row() for answer in answers],
            "cpu_s": cpu_s,
            "engine_ready_s": opening[2:],
        }

    @by_side
    def memory(self, side: Side) -> Results:
        """Measure each further model's memory in all processes, where all fit and where two fit."""
        folders = [*self._models(max(self.plan.models, 1 + FURTHER))]
        measured = {}
        for kind, mib in (("all fit", UNLIMITED_MIB), ("two fit", self.plan.two_mib)):
            steps = []
            with side.start(mib, f"memory-{mib}") as server, self.clients.one(server) as client:
                for folder in folders:
                    client.must(folder.name)
                    time.sleep(self.plan.pause_s)
                    states = Counter(server.states().values())
                    steps.append({**process_tree.memory(server.pid), "states": dict(states)})
            each = each_further(steps[-1 - FURTHER], steps[-1], FURTHER)
            measured[kind] = {"steps": steps, "each": each}
        return measured

    @by_side
    def registered(self, side: Side) -> Results:
        """Measure first calls to all models of a new server, then calls to any of them."""
        with (
            ControlGroup(self.plan.container_mib, seen=True) as group,
            side.start(self.plan.budget_mib, "registered", prefix=group.prefix) as server,
            self.clients.one(server) as client,
        ):
            steps, answers = [process_tree.memory(server.pid)], []
            for number, folder in enumerate(tqdm(self.folders, desc="registered", disable=None)):
                answers.append(client.ask(folder.name, new_tokens=1))
                if number + 1 in (SETTLED, len(self.folders)):
                    steps.append(process_tree.memory(server.pid))
            again = [client.ask(name, new_tokens=1) for name, _ in self.turns[: self.plan.requests]]
            return {
                "ready_s": server.ready_s,
                "first_call": [answer.row() for answer in answers],
                "any_call": [answer.row() for answer in again],
                "states": dict(Counter(server.states().values())),
                "at_ready": steps[0],
                "memory": steps[-1],
                "each": each_further(steps[1], steps[-1], len(self.folders) - SETTLED),
            }

    @by_side
    def first(self, side: Side) -> list[float]:
        """Measure seconds from a call to the first token of an fp32 artifact never loaded before.

        Each try has a new server with an empty cache.
        """
        folder = random_model.make(self.store, self.plan.config, 0)
        measured = []
        for _ in range(self.plan.tries):
            with (
                tempfile.TemporaryDirectory(dir=self.workdir, prefix=".empty-") as cache,
                side.start(0, "first", folder.parent, ENGINE_CACHE_DIR=cache) as server,
                self.clients.one(server) as client,
            ):
                time.sleep(BEFORE_FIRST_S)
                measured.append(client.must(folder.name, new_tokens=1).first_s)
        return measured

    def disk(self) -> Results:
        """Measure first tokens of models whose pages are not in memory, by the disk's speed.

        Each model is called at its first load, and again after others have taken the memory.
        """
        measured = []
        memory_mib = max(self.plan.two_mib + 640, 1024)
        for mb_s in DISK_MB_S:
            self._drop_pages()
            with (
                ControlGroup(memory_mib, mb_s, store=self.tuned) as group,
                self.sides[0].start(
                    self.plan.two_mib, f"disk-{mb_s}", prefix=group.prefix
                ) as server,
                self.clients.one(server) as client,
            ):
                for folder in self.folders * 2:
                    before = process_tree.usage(server.pid)["read_bytes"]
                    answer = client.ask(folder.name, new_tokens=1)
                    read = process_tree.usage(server.pid)["read_bytes"] - before
                    measured.append({"mb_s": mb_s, "read_bytes": read, **answer.row()})
        return {"now": measured}

    def models(self) -> int:
        """Return the bytes on disk of all models and their prepared files."""
        return sum(512 * p.stat().st_blocks for f in self.folders for p in f.rglob("*"))


@contextlib.contextmanager
def _tree(commit: str) -> Iterator[Path]:
    """Check out another commit into a temporary folder, as a git worktree."""
    with tempfile.TemporaryDirectory(prefix="against-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        add = [*git, "add", "--detach", str(tree), commit]
        done = subprocess.run(add, capture_output=True, text=True)
        if done.returncode:
            raise ProgramError(f"--against {commit}: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True)
