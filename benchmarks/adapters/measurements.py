"""Measures LoRA adapters of one base: several in one pass, and a thousand behind one server."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.adapters import peers, tables
from benchmarks.report.tables import Results
from benchmarks.run import Run, in_turns, seconds_of
from benchmarks.steps import decode_step, filled
from benchmarks.switching.clients import Budgeted, Clients
from command.model_writer import write_adapter
from common.memory import MIB
from engine.artifacts.config import GPT2Config
from engine.budget import budget_bytes
from engine.native.adapter import LowRank, NativeAdapter
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.prepared.folder import NAME as PREPARED
from engine.prepared.manifest import Manifests
from testbed import process_tree, random_model
from testbed.control_group import ControlGroup
from testbed.folders import building
from testbed.process import ProgramError
from testbed.server import Server
from testbed.trace import Kind, trace

ROWS = 8
RANKS = (4, 8, 16, 32, 64)
PROMPT_TOKENS = 16
BESIDE = 8  # adapters, and whole fine-tunes, of the runs beside peers
PEER_S = 10  # seconds of a trace with peers for each of `Plan.minutes`
FURTHER = 20  # adapters beyond the first two, whose mean memory is measured
CALLED = 50  # adapters that are called for the first time
ZIPF = Kind(zipf=1.0, bursts=0, scans=0, moves=False)
UNIFORM = Kind(zipf=0.0, bursts=0, scans=0, moves=False)


@dataclass(frozen=True)
class Plan(Budgeted):
    """Sizes of a measurement of adapters."""

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


class AdaptersRun(Run):
    plan: Plan
    PLAN, QUICK = Plan(), Plan(random_model.TINY, 6, 2, 0.02, 2, 2, 4, engine_mib=16)
    PARTS = DEFAULT = ("steps", "memory", "first", "trace", "uniform", "peers")
    GOALS = tables.GOALS
    LINES = tables.lines

    def __init__(self, plan: Plan, wanted: Sequence[str], workdir: Path) -> None:
        super().__init__(plan, wanted, workdir)
        c = plan.config
        self.adapted = workdir / f"adapters-{c.num_layers}x{c.units}-{plan.rank}"
        prompts = random_model.prompts(random_model.TINY, 1, PROMPT_TOKENS)
        self.clients = Clients(prompts, plan.clients, plan.new_tokens, watches=False)
        self.results["plan"]["budget_mib"] = plan.budget_mib

    def prepare(self) -> None:
        self.base = random_model.make(self.store, self.plan.config, 0)
        if set(self.wanted) - {"steps"}:
            self.names = [*self._adapters()]

    def _adapters(self) -> Iterator[str]:
        """Yield the names of the store's adapters; write the base and each unless it exists."""
        self.adapted.mkdir(exist_ok=True)
        base = self.adapted / self.base.name
        if not base.exists():
            random_model.copy(self.base, base)
        matrices = None
        for number in tqdm(range(self.plan.models), "adapters", disable=None):
            folder = self.adapted / f"adapter-{number:04}"
            if not folder.exists():
                matrices = matrices or random_model.low_rank(self.plan.config, self.plan.rank, 0)
                # Drawing numbers takes long, so all adapters have the same, rotated differently.
                turned = {
                    key: LowRank(
                        np.roll(m.down, 7 * number).astype(np.float16),
                        np.roll(m.up, 7 * number).astype(np.float16),
                    )
                    for key, m in matrices.items()
                }
                with building(folder) as new:
                    write_adapter(new, base.name, turned, self.plan.rank)
            yield folder.name

    # In one process

    def steps(self) -> list[Results]:
        with contextlib.ExitStack() as opened:
            return self._steps(opened)

    def _steps(self, opened: contextlib.ExitStack) -> list[Results]:
        """Measure decode steps of `ROWS` rows, in turns.

        The rows have no adapters, `adapters` different ones of `rank`, or a whole model each.
        """
        manifests, config, rank = Manifests(), self.plan.config, self.plan.rank

        def open_model(seed: int) -> NativeModel:
            folder = random_model.make(self.store, config, seed)
            file = prepared(manifests.open(folder), "int8", self.workdir / "adapter-steps")
            return opened.enter_context(contextlib.closing(NativeModel(file)))

        def packed(rank: int) -> list[NativeAdapter]:
            matrices = (random_model.low_rank(config, rank, seed) for seed in range(ROWS))
            return [NativeAdapter.of(config, "int8", each) for each in matrices]

        model = open_model(0)
        rows = [filled(model) for _ in range(ROWS)]
        wholes = [(whole, [filled(whole)]) for whole in map(open_model, range(ROWS))]

        def in_turn() -> None:
            for whole, row in wholes:
                decode_step(whole, row, [None])

        kinds: dict[tuple[str, int, int], Callable[[], None]] = {
            ("one model", 0, 0): partial(decode_step, model, rows, [None] * ROWS)
        }
        of_rank = {each: packed(each) for each in sorted({*RANKS, rank})}
        for each, count in (*((rank, count) for count in (1, 2, 4)), *((r, ROWS) for r in of_rank)):
            adapters = [of_rank[each][i % count] for i in range(ROWS)]
            kinds["adapters", each, count] = partial(decode_step, model, rows, adapters)
        kinds["whole models", 0, ROWS] = in_turn
        steps = {kind: partial(seconds_of, step) for kind, step in kinds.items()}
        return [
            {"kind": kind, "rank": rank, "adapters": count, "seconds": seconds}
            for (kind, rank, count), seconds in in_turns(steps, self.plan.rounds).items()
        ]

    # By the server

    @contextlib.contextmanager
    def _server(self, log: str, **environment: str) -> Iterator[Server]:
        environment["ENGINE_MEMORY_MIB"] = str(self.plan.budget_mib)
        log_file = self.log(f"adapters-{log}")
        with (
            ControlGroup(self.plan.container_mib, seen=True) as group,
            Server(self.adapted, log_file, environment=environment, prefix=group.prefix) as server,
        ):
            yield server

    def memory(self) -> Results:
        """Measure each further adapter's memory in all processes, without a prefix cache."""
        names, settings = self.names[: FURTHER + 2], {"ENGINE_PREFIX_CACHE_MIB": "0"}
        with self._server("memory", **settings) as server, self.clients.one(server) as client:
            for name in names[:2]:
                client.must(name)
            before = process_tree.memory(server.pid)
            for name in names[2:]:
                client.must(name)
            after = process_tree.memory(server.pid)
        c, rank = self.plan.config, self.plan.rank
        numbers = rank * (6 * c.units + c.hidden_size + c.units) * c.num_layers
        each = process_tree.each_further(before, after, len(names) - 2)
        return {"each": each, "bytes": 2 * numbers}

    def first(self) -> Results:
        """Measure seconds from a call to the first token, for adapters that are not loaded.

        `ever`: adapters that were never loaded; `again`: after they were unloaded.
        """
        names = self.names[-CALLED:]
        for name in names:
            for file in (self.adapted / name).iterdir():
                if file.is_file():
                    file.read_bytes()
            shutil.rmtree(self.adapted / name / PREPARED, ignore_errors=True)
        with self._server("first") as server, self.clients.one(server) as client:
            client.must(self.names[0])
            first = [client.must(name, new_tokens=1).first_s for name in names]
            for name in names:
                server.unload(name)
            again = [client.must(name, new_tokens=1).first_s for name in names]
        return {"ever": first, "again": again}

    def _trace(self, kind: Kind) -> Results:
        """Measure a trace of requests to all adapters, then requests to one adapter alone."""
        plan = self.plan
        expected: dict[tuple[str, int], str] = {}
        with self._server(f"trace-{kind.zipf}") as server:
            with self.clients.one(server) as client:
                for name in tqdm(self.names, "adapters alone", disable=None):
                    expected[name, 0] = client.must(name).text
            if len(set(expected.values())) < plan.models // 2:
                raise ProgramError("adapters give the same texts, which must differ")
            requests = int(60 * plan.minutes * 1000)  # more than can be answered
            turns = [(self.names[m], 0) for m in trace(plan.seed, kind, plan.models, requests)]
            answers, measured = self.clients.measure(server, turns, expected, 60 * plan.minutes)
            return {**measured, "requests": len(answers), "loaded": len(server.states())}

    trace, uniform = partialmethod(_trace, ZIPF), partialmethod(_trace, UNIFORM)

    def peers(self) -> list[Results]:
        """Measure one trace of requests to a few adapters on this server, llama.cpp's and PEFT."""
        plan, count = self.plan, min(self.plan.models, BESIDE)
        seconds = PEER_S * plan.minutes
        requests = int(1000 * seconds)  # more than can be answered
        tuned = self.workdir / "tuned"
        tuned.mkdir(exist_ok=True)
        traces = {
            name: trace(plan.seed, kind, count, requests)
            for name, kind in (("Zipf", ZIPF), ("uniform", UNIFORM))
        }
        case = peers.Case(
            base=self.base,
            store=self.adapted,
            names=self.names[:count],
            wholes=[*random_model.fine_tunes(tuned, plan.config, count)],
            traces=traces,
            clients=self.clients,
            seconds=seconds,
            budget_mib=plan.budget_mib,
            exports=self.workdir / "peers" / self.adapted.name,
            log=self.log,
        )
        return peers.measure(case, self.skipping)
