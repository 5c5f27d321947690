"""Measured: many fine-tunes on a machine that cannot hold them all, and switching between them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from benchmarks import page_cache, random_model
from benchmarks.contenders import peers
from benchmarks.engine import process as engine_process
from benchmarks.http_server import HTTPServer
from benchmarks.process import ROOT, BenchmarkError
from benchmarks.report import machine
from benchmarks.report.goals import goals
from benchmarks.switching import process_tree
from benchmarks.switching import trace as eviction_trace
from benchmarks.switching.clients import STATES, Asked, Client, Server, count_faults, run
from benchmarks.switching.control_group import ControlGroup
from benchmarks.switching.llama_server import LlamaServer
from benchmarks.switching.tables import CONTAINER_GOALS, GOALS, lines
from common.errors import EngineError
from common.eviction import Held
from common.memory import MIB
from engine.artifacts.config import GPT2Config
from engine.budget import budget_bytes
from engine.http.client import EngineClient
from engine.prepared import cache as prepared

__all__ = ["DEFAULT", "PARTS", "Plan", "lines", "measure"]

PARTS = ("trace", "swaps", "memory", "first", "sweep", "disk")
DEFAULT = ("trace", "swaps", "memory", "first")
PEER = "llama.cpp"
SMALL = GPT2Config(2_000, 128, 2, 2, 512, 128)
PROMPT_TOKENS = 16
PROMPTS = 2
TRACE = eviction_trace.Kind(scans=1, moves=False)
MANY = 20  # with more the artifacts do not stay beside what is prepared
DISK_MB_S = (50, 100, 200, 400, None)

Results = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """`engine_mib` is the engine's budget: of the default models five fit into it, in int8.

    container_mib: 0, or a control group's memory, and then the budget is what a container of that
    size would have
    minutes: 0, or how long the trace is asked, instead of `requests`
    """

    config: GPT2Config = random_model.FULL
    models: int = 8
    requests: int = 300
    clients: int = 4
    new_tokens: int = 16
    pause_s: float = 0.3
    rounds: int = 2
    engine_mib: int = 720
    two_mib: int = 300  # where two fit
    container_mib: int = 0
    minutes: float = 0
    tries: int = 3
    seed: int = 0

    @classmethod
    def quick(cls) -> Plan:
        """Some seconds on tiny models: shows that everything runs, not how fast."""
        return cls(SMALL, 4, 24, 2, 4, 0.01, 1, 3, 2, tries=1)

    @property
    def budget_mib(self) -> int:
        return (
            budget_bytes(self.container_mib << 20) // MIB if self.container_mib else self.engine_mib
        )

    def trace(self, folders: Sequence[Path]) -> list[tuple[str, int]]:
        requests = self.requests
        if self.minutes:  # more than can be asked in that time
            requests = int(self.minutes * 60 * self.clients / self.pause_s)
        asked = eviction_trace.trace(self.seed, TRACE, self.models, requests)
        return [(folders[m].name, i % PROMPTS) for i, m in enumerate(asked)]


class Ours(HTTPServer):
    """Our server over a folder of models, with a small budget."""

    def __init__(self, store: Path, log: Path, engine_mib: int, **more: Any) -> None:
        environment = {"ENGINE_MEMORY_MIB": str(engine_mib), **more.pop("environment", {})}
        super().__init__({}, log, store=store, environment=environment, **more)
        self._engine = EngineClient(str(self.run_dir / "engine.sock"))

    def states(self) -> dict[str, str]:
        """A server that knows no residency has models loaded, or not."""
        rows = self._engine.request("GET", "/models")["models"]
        # To the engine a model is called what the gateway calls it, "#" and its id.
        return {row["name"].rpartition("#")[0]: row.get("residency", "hot") for row in rows}

    def call(self, model: str, ids: list[int], new_tokens: int) -> tuple[str, dict[str, Any]]:
        parameters = {"max_new_tokens": new_tokens}
        body = {"inputs": random_model.text_of(ids), "parameters": parameters, "stream": True}
        return f"/predictions/{model}", body

    def token(self, line: bytes) -> str | None:
        event = json.loads(line)
        return event["text"] if "token" in event else None


@dataclass
class Side:
    """One that is measured, and what its models say when they are asked alone."""

    name: str
    start: Callable[..., Any]  # (budget in MiB, its log, ...)
    expected: dict[tuple[str, int], str] = field(default_factory=dict)


def measure(
    plan: Plan,
    wanted: tuple[str, ...],
    workdir: Path,
    against: str | None = None,
    save: Callable[[Results], object] = lambda results: None,
) -> Results:
    """What `wanted` names. What cannot be measured is in `results["skipped"]`, and why.

    `save` is called with what there is after each part: a run may take an hour.
    """
    with contextlib.ExitStack() as stack:
        return _Run(plan, wanted, workdir, against, stack).measure(save)


class _Run:
    def __init__(
        self,
        plan: Plan,
        wanted: tuple[str, ...],
        workdir: Path,
        against: str | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.plan, self.wanted = plan, wanted
        self.workdir, self.logs = workdir, workdir / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        count = plan.models
        self.many = count > MANY
        # Hollow ones cannot be prepared in another format.
        self.store = workdir / (f"hollow-{prepared.FORMAT}" if self.many else "tuned")
        self.folders = random_model.fine_tunes(self.store, plan.config, count)
        self.prompts = random_model.prompts(random_model.TINY, PROMPTS, PROMPT_TOKENS)
        self.trace = plan.trace(self.folders)
        self.trees = {"now": ROOT}
        if against:
            if self.many:
                raise BenchmarkError(f"--against takes at most {MANY} models")
            self.trees[against] = stack.enter_context(_tree(against))
        self.sides = [self._side(name, tree) for name, tree in self.trees.items()]
        self.results: Results = {
            "machine": machine.describe(),
            "commit": _commit(ROOT),
            "against": against and _commit(self.trees[against]),
            "plan": {**asdict(plan), "budget_mib": plan.budget_mib},
            "wanted": list(wanted),
            "skipped": {},
        }

    def _side(self, name: str, tree: Path) -> Side:
        def start(mib: int, log: str, **more: Any) -> Ours:
            return Ours(self.store, self._log(f"{log}-{name}"), mib, root=tree, **more)

        return Side(name, start)

    def _log(self, name: str) -> Path:
        return self.logs / f"switching-{name.replace('/', '_')}.log"

    def measure(self, save: Callable[[Results], object]) -> Results:
        with self._skipping("models"):
            for side in self.sides:
                side.expected = self._prepare(side)
        parts: dict[str, Callable[[], Any]] = {
            "trace": self._traces,
            "swaps": lambda: {side.name: self._swaps(side) for side in self.sides},
            "memory": lambda: {side.name: self._memory(side) for side in self.sides},
            "first": lambda: {side.name: self._first(side) for side in self.sides},
            "sweep": lambda: {side.name: self._sweep(side) for side in self.sides},
            "disk": lambda: {side.name: self._disk(side) for side in self.sides[:1]},
        }
        if not self.results["skipped"]:
            for name in tqdm(
                [n for n in PARTS if n in self.wanted], desc="measuring", disable=None
            ):
                with self._skipping(name):
                    self.results[name] = parts[name]()
                self._judge()
                save(self.results)
        self._judge()
        return self.results

    def _judge(self) -> None:
        wanted = CONTAINER_GOALS if self.plan.container_mib else GOALS
        self.results["goals"] = list(goals(self.results, wanted))

    def _prepare(self, side: Side) -> dict[tuple[str, int], str]:
        """Asks each model alone; the first time it is quantized. The popular ones come last."""
        server = side.start(self.plan.budget_mib, "prepare")
        try:
            return self._alone(server, side.name)
        finally:
            server.close()

    def _alone(self, server: Server, name: str) -> dict[tuple[str, int], str]:
        client = Client(server)
        found = {}
        for folder in tqdm(self.folders, desc=f"models alone, {name}", disable=None):
            for prompt, ids in enumerate(self.prompts):
                answer = client.ask(folder.name, prompt, ids, self.plan.new_tokens)
                if answer.error:
                    raise BenchmarkError(f"{name}: {folder.name} alone: {answer.error}")
                found[folder.name, prompt] = answer.text
            if self.many:
                random_model.hollow(folder)
        client.close()
        return found

    # The trace

    def _traces(self) -> Results:
        """In rounds, side after side."""
        found: Results = {}
        for number in range(self.plan.rounds):
            for side in itertools.chain(self.sides, self._peer(found)):
                with self._skipping(side.name):
                    one = self._trace(side, self.plan.budget_mib, f"trace-{number}")
                    found.setdefault(side.name, []).append(one)
        return {name: _joined(rounds) for name, rounds in found.items()}

    def _peer(self, found: Results) -> Iterator[Side]:
        """llama.cpp's server, once it is known how many models ours held: it may hold as many."""
        if (
            self.plan.container_mib
            or self.many
            or "now" not in found
            or PEER in self.results["skipped"]
        ):
            return
        with self._skipping(PEER):
            binary = peers.llama_server()
            exports = self.workdir / "peers"
            for folder in self.folders:
                peers.export(PEER, folder, exports, self._log(PEER))
            at_once = max(one["room"] for one in found["now"])

            def start(mib: int, log: str) -> LlamaServer:
                return LlamaServer(binary, exports, at_once, self.plan.clients, self._log(PEER))

            side = Side(PEER, start)
            server = start(0, "prepare")
            try:
                side.expected = self._alone(server, PEER)
            finally:
                server.close()
            yield side

    def _trace(self, side: Side, mib: int, log: str) -> Results:
        plan = self.plan
        with contextlib.ExitStack() as stack:
            more: dict[str, Any] = {}
            group = None
            if plan.container_mib:
                for folder in self.folders:
                    page_cache.drop(path for path in folder.rglob("*") if path.is_file())
                group = stack.enter_context(ControlGroup(plan.container_mib))
                more["prefix"] = group.prefix
            server = side.start(mib, log, **more)
            stack.callback(server.close)
            warm_up = self._warm_up(server)
            before = process_tree.usage(server.pid)
            answers, seconds = run(
                server, self.trace, self.prompts, plan.clients, plan.new_tokens, plan.pause_s,
                60 * plan.minutes or None,
            )  # fmt: skip
            after = process_tree.usage(server.pid)
            memory = process_tree.memory(server.pid)
            one = [(self.trace[0][0], i % PROMPTS) for i in range(max(len(answers) // 4, 8))]
            one = one[: 100 * plan.clients]
            alone, alone_s = run(
                server, one, self.prompts, plan.clients, plan.new_tokens, plan.pause_s
            )
            limited = group.page_ins() if group else {}
        return {
            "warm_up": warm_up,
            "asked": [_row(answer) for answer in answers],
            "seconds": seconds,
            "tokens_per_s": sum(a.tokens for a in answers) / seconds,
            "alone_tokens_per_s": sum(a.tokens for a in alone) / alone_s,
            "room": max(answer.hot for answer in answers),
            "faults": count_faults([*answers, *alone], side.expected),
            "memory": memory,
            "usage": {key: after[key] - before[key] for key in before} | limited,
            "ready_s": server.ready_s,
        }

    def _warm_up(self, server: Server) -> list[str]:
        """Every model once, the most popular last."""
        counts = Counter(model for model, _ in self.trace)
        client = Client(server)
        names = sorted((folder.name for folder in self.folders), key=counts.__getitem__)
        for name in names:
            client.ask(name, 0, self.prompts[0], 1)
        client.close()
        return names

    def _sweep(self, side: Side) -> list[Results]:
        """The trace with less and less memory, down to one model."""
        each = self.plan.engine_mib / 5
        found = []
        for room in range(self.plan.models, 0, -max(self.plan.models // 8, 1)):
            mib = max(int(each * room), 1)
            one = _joined([self._trace(side, mib, f"sweep-{room}")])
            found.append({"share": room / self.plan.models, "mib": mib, **one})
        return found

    # Alone

    def _swaps(self, side: Side) -> Results:
        """One client asks one model after the other, where only two fit; and the engine alone."""
        server = side.start(self.plan.two_mib, "swaps")
        try:
            client = Client(server)
            for folder in self.folders:
                client.ask(folder.name, 0, self.prompts[0], 1)
            before = process_tree.usage(server.pid)["cpu_s"]
            answers = [
                client.ask(folder.name, 0, self.prompts[0], 1)
                for _ in range(self.plan.tries)
                for folder in self.folders
            ]
            cpu_s = (process_tree.usage(server.pid)["cpu_s"] - before) / len(answers)
            client.close()
        finally:
            server.close()
        text = random_model.text_of(self.prompts[0])
        with engine_process.EngineProcess(
            self._log("engine"), root=self.trees[side.name]
        ) as engine:
            opening = []
            for _ in range(1 + self.plan.tries):
                for folder in self.folders[:2]:
                    began = time.perf_counter()
                    engine.load("m", folder)
                    opening.append(time.perf_counter() - began)
                    engine.generate("m", text, 1)
                    engine.unload("m")
        return {
            "asked": [_row(answer) for answer in answers],
            "cpu_s": cpu_s,
            "engine_ready_s": opening[2:],
        }

    def _memory(self, side: Side) -> Results:
        """What each further model takes, of all processes: where all fit, and where two do."""
        found = {}
        for kind, mib in (("all fit", 1 << 20), ("two fit", self.plan.two_mib)):
            server = side.start(mib, f"memory-{mib}")
            try:
                client, steps = Client(server), []
                for folder in self.folders:
                    answer = client.ask(folder.name, 0, self.prompts[0], self.plan.new_tokens)
                    if answer.error:
                        raise BenchmarkError(f"{folder.name}: {answer.error}")
                    time.sleep(self.plan.pause_s)
                    states = Counter(server.states().values())
                    steps.append({**process_tree.memory(server.pid), "states": dict(states)})
                client.close()
            finally:
                server.close()
            found[kind] = {"steps": steps, "each": _each(steps)}
        return found

    def _first(self, side: Side) -> list[float]:
        """Seconds from a call to its first token, of a model that was never loaded, in fp32."""
        folder = random_model.make(self.workdir / "models", self.plan.config, 0)
        found = []
        with tempfile.TemporaryDirectory(dir=self.workdir, prefix=".empty-") as cache:
            environment = {"ENGINE_CACHE_DIR": cache, "ENGINE_MEMORY_MIB": "0"}
            log, root = self._log(f"first-{side.name}"), self.trees[side.name]
            server = Ours(folder.parent, log, 0, environment=environment, root=root)
            try:
                client = Client(server)
                for _ in range(self.plan.tries):
                    answer = client.ask(folder.name, 0, self.prompts[0], 1)
                    if answer.error:
                        raise BenchmarkError(f"the very first load: {answer.error}")
                    found.append(answer.first_s)
                    server.unload(folder.name)
                    for path in Path(cache).iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                client.close()
            finally:
                server.close()
        return found

    def _disk(self, side: Side) -> list[Results]:
        """The first token of models whose pages are not in memory, by the disk's speed: of the
        first load, and once more when others have taken the memory."""
        found = []
        for mb_s in DISK_MB_S:
            for folder in self.folders:
                page_cache.drop(path for path in folder.rglob("*") if path.is_file())
            with ControlGroup(max(self.plan.two_mib + 640, 1024), mb_s) as group:
                server = side.start(self.plan.two_mib, f"disk-{mb_s}", prefix=group.prefix)
                try:
                    client = Client(server)
                    for folder in [*self.folders, *self.folders]:
                        before = process_tree.usage(server.pid)["read_bytes"]
                        answer = client.ask(folder.name, 0, self.prompts[0], 1)
                        read = process_tree.usage(server.pid)["read_bytes"] - before
                        found.append({"mb_s": mb_s, "read_bytes": read, **_row(answer)})
                    client.close()
                finally:
                    server.close()
        return found

    @contextlib.contextmanager
    def _skipping(self, name: str) -> Iterator[None]:
        """Goes on without what fails, and says so."""
        try:
            yield
        except (BenchmarkError, EngineError, OSError, requests.RequestException) as error:
            self.results["skipped"][name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)


def _row(answer: Asked) -> Results:
    row = dataclasses.asdict(answer)
    del row["text"]
    return row


def _each(steps: list[Results]) -> Results:
    """What each model after the second added, on average, by kind of process."""
    second, last, more = steps[1], steps[-1], max(len(steps) - 2, 1)
    return {
        kind: {
            key: (counts[key] - second["by_kind"].get(kind, {}).get(key, 0)) / more
            for key in ("rss", "pss", "anonymous")
        }
        for kind, counts in last["by_kind"].items()
    }


def _joined(rounds: list[Results]) -> Results:
    """The rounds with what is said of all their requests together."""
    asked = [a for one in rounds for a in one["asked"]]
    states = {state: [a["first_s"] for a in asked if a["state"] == state] for state in STATES}
    everything = [a["first_s"] for a in asked if not a["error"]]
    room = max(one["room"] for one in rounds)
    return {
        "rounds": rounds,
        "first_token_s": {
            "all": quantiles(everything),
            **{state: quantiles(values) for state, values in states.items() if values},
        },
        "tokens_per_s": statistics.median(one["tokens_per_s"] for one in rounds),
        "against_alone": statistics.median(
            one["tokens_per_s"] / one["alone_tokens_per_s"] for one in rounds
        ),
        "room": room,
        "hits": hits(rounds, room),
        "faults": {
            key: sum(one["faults"][key] for one in rounds)
            for key in ("wrong", "lost", "4xx", "5xx")
        },
    }


def hits(rounds: list[Results], room: int) -> dict[str, float]:
    """The share of requests that found their model hot, and what caches of that room would have."""
    asked = [a for one in rounds for a in one["asked"]]
    found = {"measured": sum(a["state"] == "hot" for a in asked) / max(len(asked), 1)}
    order = [*rounds[0]["warm_up"], *(a["model"] for a in rounds[0]["asked"])]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(order))}
    trace = [numbers[name] for name in order]
    counted = len(trace) / max(len(rounds[0]["asked"]), 1)  # none of the warm-up is a hit
    models = dict.fromkeys(numbers.values(), Held(1, 1.0))
    policies: dict[str, eviction_trace.Policy] = {
        "LRU": eviction_trace.LRU(),
        "GDSF": eviction_trace.GDSF(models),
        "common.eviction": eviction_trace.Ours(),
        "Belady": eviction_trace.Belady(trace),
    }
    for name, policy in policies.items():
        found[name] = counted * eviction_trace.replay(policy, trace, models, max(room, 1))[0]
    return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        value = values[0] if values else float("nan")
        return {"count": len(values)} | dict.fromkeys(("p50", "p90", "p99", "most"), value)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "most": max(values)}
    return {"count": len(values), **named}


@contextlib.contextmanager
def _tree(commit: str) -> Iterator[Path]:
    """The tree of another commit, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="against-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        done = subprocess.run(
            [*git, "add", "--detach", str(tree), commit], capture_output=True, text=True
        )
        if done.returncode:
            raise BenchmarkError(f"--against {commit}: {done.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True)


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "no git"
