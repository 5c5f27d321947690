"""Measures one trace of requests to a few adapters on this server, llama.cpp's and PEFT.

The trace also goes to as many whole fine-tunes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import peers
from benchmarks.contenders.llama_server import COMPUTE_ALL_PROMPTS, LlamaAdapters, LlamaServer
from benchmarks.process import Worker
from benchmarks.report.tables import Results, quantiles
from benchmarks.switching.clients import Clients
from testbed import process_tree
from testbed.process import ProgramError
from testbed.random_model import text_of
from testbed.server import Server

CHECKED = 4  # adapters whose greedy text is compared with transformers'
FP32 = ("ours, fp32", "PEFT, fp32")  # must decode the same tokens


@dataclass(frozen=True)
class Case:
    """The models, traces and limits of every contender.

    names: names of the adapters
    wholes: folders of the whole fine-tunes
    traces: indices of models, by kind of trace
    """

    base: Path
    store: Path
    names: Sequence[str]
    wholes: Sequence[Path]
    traces: Mapping[str, Sequence[int]]
    clients: Clients
    seconds: float
    budget_mib: int
    exports: Path
    log: Callable[[str], Path]

    def folders(self) -> list[Path]:
        return [self.store / name for name in self.names]


def measure(case: Case, skipping: Callable[[str], Any]) -> list[Results]:
    """Measure each contender that is installed, one row of results each.

    Raises `ProgramError` where one in fp32 makes another text than transformers.
    """
    results: list[Results] = []
    wanted: list[list[int]] = []
    with skipping("peft"):
        log, folders = case.log("adapters-peft"), case.folders()
        with peers.start("peft", "peft", case.base, folders, case.exports, log) as worker:
            row = _of_peft(case, worker, wanted)
        results.append(row)
    sides: dict[str, Callable[[], Server | LlamaServer]] = {
        FP32[0]: lambda: _ours(case, case.store, "fp32"),
        "llama.cpp Q8_0": lambda: _llama(case),
        "ours, int8": lambda: _ours(case, case.store),
    }
    for name, start in sides.items():
        with skipping(name), start() as server:
            row = {"name": name, **_of_server(case, server, case.names)}
            row |= {"same": _same(row.pop("texts"), wanted, server)}
            results.append(row)
            if name in FP32 and wanted and row["same"] < 1:
                raise ProgramError(
                    f"{name}: {row['same']:.0%} of tokens are transformers', must be all"
                )
    with skipping("whole fine-tunes"), _ours(case, case.wholes[0].parent) as server:
        row = _of_server(case, server, [folder.name for folder in case.wholes])
        results.append({**row, "name": "ours, int8: whole fine-tunes", "texts": None})
    return results


def _ours(case: Case, store: Path, precision: str = "int8") -> Server:
    environment = {"ENGINE_MEMORY_MIB": str(case.budget_mib), **COMPUTE_ALL_PROMPTS}
    log = case.log("adapters-peers")
    return Server(store, log, backend=(Server.backend, precision), environment=environment)


def _llama(case: Case) -> LlamaAdapters:
    log = case.log("adapters-llama.cpp")
    peers.python("llama.cpp")
    base = peers.export("llama.cpp", case.base, case.exports, log)
    files = [peers.export("llama.cpp", folder, case.exports, log) for folder in case.folders()]
    return LlamaAdapters(base, dict(zip(case.names, files, strict=True)), case.clients.count, log)


def _of_server(case: Case, server: Server | LlamaServer, names: Sequence[str]) -> Results:
    results = Results()
    with case.clients.one(server) as client:
        results["texts"] = [client.must(name).text for name in names][:CHECKED]
    for kind, numbers in case.traces.items():
        turns = [(names[number], 0) for number in numbers]
        answers, seconds = case.clients.run(server, turns, case.seconds)
        if errors := [answer.error for answer in answers if answer.error]:
            raise ProgramError(f"{len(errors)} of {len(answers)} failed: {errors[0]}")
        results[kind] = {
            "tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
            "first_token_s": quantiles([answer.first_s for answer in answers]),
        }
    return {**results, "memory": process_tree.memory(server.pid)["pss"]}


def _of_peft(case: Case, worker: Worker, wanted: list[list[int]]) -> Results:
    """Measure PEFT; add the token ids of each compared adapter in transformers to `wanted`."""
    how = {"ids": case.clients.prompts[0], "new_tokens": case.clients.new_tokens}
    wanted += [worker.call("alone", name=name, **how) for name in case.names[:CHECKED]]
    results = Results(name=FP32[1], same=1.0)
    same: list[float] = []
    for kind, numbers in case.traces.items():
        names = [case.names[number] for number in numbers]
        limits = {"rows": case.clients.count, "limit_s": case.seconds}
        answer = worker.call("trace", names=names, **how, **limits)
        ids = answer["ids"]
        known = [(wanted[n], i) for n, i in zip(numbers, ids, strict=False) if n < len(wanted)]
        same += [_common(a, b) for a, b in known]
        results[kind] = {
            "tokens_per_s": sum(map(len, ids)) / answer["seconds"],
            "first_token_s": quantiles(answer["first_s"]),
        }
    if min(same, default=0) < 1:
        raise ProgramError("a row's text depends on the others of its batch")
    return {**results, "memory": process_tree.memory(worker.pid)["pss"]}


def _same(texts: Sequence[str], wanted: Sequence[list[int]], server: Any) -> float | None:
    """Return the mean share of tokens before the first that differs from transformers'."""
    if not wanted:
        return None
    shares = []
    for text, ids in zip(texts, wanted, strict=True):
        if isinstance(server, LlamaAdapters):  # whose text of a token is its id
            shares.append(_common(text.split(), [*map(str, ids)]))
        else:
            shares.append(_common(text, text_of(ids)))
    return sum(shares) / len(shares)


def _common(a: Sequence[Any], b: Sequence[Any]) -> float:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(b)) / len(b)
