"""Measured: adapters (LoRA) of one base, in one pass, and a thousand of them behind one server."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import random_model
from benchmarks.adapters import peers, tables
from benchmarks.process import BenchmarkError
from benchmarks.run import Results, Run
from benchmarks.switching import process_tree
from benchmarks.switching.clients import Client, count_faults, run
from benchmarks.switching.control_group import ControlGroup
from benchmarks.switching.servers import Ours
from benchmarks.switching.summary import each_further, quantiles
from benchmarks.switching.trace import Kind, trace
from command.model_writer import write_adapter
from common.memory import MIB
from engine.artifacts.config import GPT2Config
from engine.backends.interface import Piece
from engine.budget import budget_bytes
from engine.native.adapter import LowRank, NativeAdapter
from engine.native.arena import NativeRow
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.prepared.folder import NAME as PREPARED
from engine.prepared.manifest import Manifests

ROWS = 8
CONTEXT = 40  # tokens behind each row of a step
PRODUCTS = ("qkv", "attention_out", "ffn_out")  # target_modules c_attn and c_proj
RANKS = (4, 8, 16, 32, 64)
PROMPT_TOKENS = 16
BESIDE = 8  # adapters, and whole fine-tunes, of the runs beside peers
PEER_S = 10  # for a minute of ours
FURTHER = 20  # adapters beyond the first, of which each one's memory is measured
CALLED = 50  # adapters that are called for the first time
ZIPF = Kind(zipf=1.0, bursts=0, scans=0, moves=False)
UNIFORM = Kind(zipf=0.0, bursts=0, scans=0, moves=False)


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement of adapters.

    container_mib: of a control group, or 0: then the budget is `engine_mib`
    """

    config: GPT2Config = random_model.FULL
    models: int = 1000
    clients: int = 8
    minutes: float = 2
    rank: int = 16
    rounds: int = 20
    new_tokens: int = 16
    container_mib: int = 0
    engine_mib: int = budget_bytes(2048 * MIB) // MIB  # as in a container of 2 GiB
    seed: int = 0

    @property
    def budget_mib(self) -> int:
        whole = self.container_mib * MIB
        return budget_bytes(whole) // MIB if whole else self.engine_mib


class AdaptersRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 30, 2, 0.05, 2, 2, 4, engine_mib=16)
    PARTS = ("steps", "memory", "first", "trace", "uniform", "peers")
    DEFAULT = PARTS
    GOALS = tables.GOALS

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        super().__init__(plan, wanted, workdir)
        c = plan.config
        self.store = workdir / f"adapters-{c.num_layers}x{c.units}-{plan.rank}"
        self.prompts = random_model.prompts(random_model.TINY, 1, PROMPT_TOKENS)
        self.results["plan"]["budget_mib"] = plan.budget_mib

    def measure(self, save: Callable[[], object]) -> None:
        self.base = random_model.make(self.workdir / "models", self.plan.config, 0)
        parts: dict[str, Callable[[], Any]] = {
            "steps": self._steps,
            "memory": self._memory,
            "first": self._first,
            "trace": lambda: self._trace(ZIPF),
            "uniform": lambda: self._trace(UNIFORM),
            "peers": self._peers,
        }
        if set(self.wanted) - {"steps"}:
            with self.skipping("adapters"):
                self.names = [*self._adapters()]
        self.measure_parts({} if self.results["skipped"] else parts, save)
        self.judge()

    def lines(self) -> str:
        return tables.lines(self.results)

    def _matrices(self, rank: int, seed: int) -> dict[tuple[int, str], LowRank]:
        """Random ones, as large as to change greedy text."""
        c, rng = self.plan.config, np.random.default_rng(seed)
        shapes = {
            "qkv": (3 * c.units, c.units),
            "attention_out": (c.units, c.units),
            "ffn_out": (c.units, c.hidden_size),
        }

        def numbers(*shape: int) -> Any:
            return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[1]))

        return {
            (layer, product): LowRank(
                numbers(rank, shapes[product][1]), numbers(shapes[product][0], rank)
            )
            for layer in range(c.num_layers)
            for product in PRODUCTS
        }

    def _adapters(self) -> Iterator[str]:
        """Names of the store's adapters, each written unless it is there, beside their base."""
        self.store.mkdir(exist_ok=True)
        base = self.store / self.base.name
        if not base.exists():
            random_model.copy(self.base, base)
        matrices = None
        for number in tqdm(range(self.plan.models), "adapters", disable=None):
            folder = self.store / f"adapter-{number:04}"
            if not folder.exists():
                matrices = matrices or self._matrices(self.plan.rank, 0)
                # Drawing numbers takes long, so they are turned round: no two adapters are alike.
                turned = {
                    key: LowRank(
                        np.roll(m.down, 7 * number).astype(np.float16),
                        np.roll(m.up, 7 * number).astype(np.float16),
                    )
                    for key, m in matrices.items()
                }
                building = folder.with_name(f".{folder.name}")
                building.mkdir(exist_ok=True)
                write_adapter(building, base.name, turned, self.plan.rank)
                building.rename(folder)
            yield folder.name

    # In one process

    def _steps(self) -> list[Results]:
        """Decode steps of `ROWS` rows, in turns.

        Without adapters, with `adapters` different ones of `rank`, and of as many whole models, one
        row each.
        """
        manifests, cache = Manifests(), self.workdir / "adapter-steps"
        opened: list[NativeModel] = []

        def open_model(seed: int) -> NativeModel:
            folder = random_model.make(self.workdir / "models", self.plan.config, seed)
            opened.append(NativeModel(prepared(manifests.open(folder), "int8", cache)))
            return opened[-1]

        model = open_model(0)
        rows = [_filled(model) for _ in range(ROWS)]
        plan, config = self.plan, self.plan.config

        def packed(rank: int, count: int) -> list[NativeAdapter]:
            return [
                NativeAdapter.of(config, "int8", self._matrices(rank, seed))
                for seed in range(count)
            ]

        of_rank = {rank: packed(rank, ROWS) for rank in sorted({*RANKS, plan.rank})}
        kinds: dict[tuple[str, int, int], Callable[[], object]] = {
            ("one model", 0, 0): lambda: _step(model, rows, [None] * ROWS)
        }

        def adapted(rank: int, count: int) -> Callable[[], object]:
            adapters = [of_rank[rank][i % count] for i in range(ROWS)]
            return lambda: _step(model, rows, adapters)

        for count in (1, 2, 4, ROWS):
            kinds["adapters", plan.rank, count] = adapted(plan.rank, count)
        for rank in of_rank:
            kinds["adapters", rank, ROWS] = adapted(rank, ROWS)
        wholes = [(m := open_model(seed), [_filled(m)]) for seed in range(ROWS)]

        def in_turns() -> None:
            for whole, row in wholes:
                _step(whole, row, [None])

        kinds["whole models", 0, ROWS] = in_turns
        seconds: dict[tuple[str, int, int], list[float]] = {kind: [] for kind in kinds}
        for _ in range(plan.rounds):
            for kind, step in kinds.items():
                began = time.perf_counter()
                step()
                seconds[kind].append(time.perf_counter() - began)
        for one in opened:
            one.close()
        return [
            {"kind": kind, "rank": rank, "adapters": count, "seconds": measured}
            for (kind, rank, count), measured in seconds.items()
        ]

    # By the server

    @contextlib.contextmanager
    def _server(self, log: str, **environment: str) -> Iterator[Ours]:
        with contextlib.ExitStack() as stack:
            more: dict[str, Any] = {"environment": environment}
            if mib := self.plan.container_mib:
                more["prefix"] = stack.enter_context(ControlGroup(mib, seen=True)).prefix
            log_file = self.log(f"adapters-{log}")
            yield stack.enter_context(Ours(self.store, log_file, self.plan.budget_mib, **more))

    def _client(self, server: Any) -> closing[Client]:
        return closing(Client(server, self.prompts, self.plan.new_tokens, watches=False))

    def _memory(self) -> Results:
        """What each further adapter takes, of all processes, where no prompt is kept."""
        names, settings = self.names[: FURTHER + 2], {"ENGINE_PREFIX_CACHE_MIB": "0"}
        with self._server("memory", **settings) as server, self._client(server) as client:
            for name in names[:2]:
                client.must(name)
            before = process_tree.memory(server.pid)
            for name in names[2:]:
                client.must(name)
            after = process_tree.memory(server.pid)
        c, rank = self.plan.config, self.plan.rank
        numbers = rank * (6 * c.units + c.hidden_size + c.units) * c.num_layers
        return {"each": each_further(before, after, len(names) - 2), "bytes": 2 * numbers}

    def _first(self) -> Results:
        """Seconds from a call to the first token, for adapters that are not loaded and one that is.

        `ever`: adapters that were never loaded; `again`: after they were unloaded.
        """
        names = self.names[-CALLED:]
        for name in names:
            for file in (self.store / name).iterdir():
                if file.is_file():
                    file.read_bytes()
            shutil.rmtree(self.store / name / PREPARED, ignore_errors=True)
        with self._server("first") as server, self._client(server) as client:
            client.must(self.names[0])
            first = [client.must(name, new_tokens=1).first_s for name in names]
            for name in names:
                server.unload(name)
            again = [client.must(name, new_tokens=1).first_s for name in names]
        return {"ever": first, "again": again}

    def _trace(self, kind: Kind) -> Results:
        """What clients get that ask for any of them, and what they get of one alone."""
        plan = self.plan
        with self._server(f"trace-{kind.zipf}") as server:
            expected: dict[tuple[str, int], str] = {}
            with self._client(server) as client:
                for name in tqdm(self.names, "adapters alone", disable=None):
                    expected[name, 0] = client.must(name).text
            if len(set(expected.values())) < plan.models // 2:
                raise BenchmarkError("the adapters say the same as each other")
            requests = int(60 * plan.minutes * 1000)  # more than can be answered
            turns = [(self.names[m], 0) for m in trace(plan.seed, kind, plan.models, requests)]
            how = (self.prompts, plan.clients, plan.new_tokens, 0.0)
            answers, seconds = run(server, turns, *how, 60 * plan.minutes, watches=False)
            memory = process_tree.memory(server.pid)
            alone, alone_s = run(
                server, [(self.names[0], 0)] * len(answers), *how, 30, watches=False
            )
            loaded = len(server.states())
        firsts = [answer.first_s for answer in answers if not answer.error]
        return {
            "requests": len(answers),
            "seconds": seconds,
            "tokens_per_s": sum(a.tokens for a in answers) / seconds,
            "alone_tokens_per_s": sum(a.tokens for a in alone) / alone_s,
            "first_token_s": quantiles(firsts),
            "alone_first_token_s": quantiles([a.first_s for a in alone]),
            "faults": count_faults([*answers, *alone], expected),
            "memory": memory,
            "loaded": loaded,
        }

    def _peers(self) -> list[Results]:
        plan, count = self.plan, min(self.plan.models, BESIDE)
        seconds = PEER_S * plan.minutes
        requests = int(1000 * seconds)  # more than can be answered
        tuned = self.workdir / "tuned"
        tuned.mkdir(exist_ok=True)
        case = peers.Case(
            self.base,
            self.store,
            self.names[:count],
            [*random_model.fine_tunes(tuned, plan.config, count)],
            {
                name: trace(plan.seed, kind, count, requests)
                for name, kind in (("Zipf", ZIPF), ("uniform", UNIFORM))
            },
            self.prompts[0],
            plan.clients,
            plan.new_tokens,
            seconds,
            plan.budget_mib,
            self.workdir / "peers" / self.store.name,
            self.log,
        )
        return peers.measure(case, self.skipping)


def _filled(model: NativeModel) -> NativeRow:
    row = model.open_row()
    rng = np.random.default_rng(0)
    model.run([Piece(row, rng.integers(4, model.config.vocab_size, CONTEXT).tolist())])
    return row


def _step(
    model: NativeModel, rows: Sequence[NativeRow], adapters: Sequence[NativeAdapter | None]
) -> None:
    """Rows stay as long as they were."""
    model.run([Piece(row, [5], 1, a) for row, a in zip(rows, adapters, strict=True)])
    for row in rows:
        model.truncate(row, CONTEXT)
