"""This server's engine side by side with others."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.lib.problem import Problem
from scripts.options import option

WORKDIR = Path(tempfile.gettempdir()) / "kogpt2-benchmark"
_switching = partial(option, rich_help_panel="Switching")


@dataclass(kw_only=True)
class Bench:
    quick: bool = option(False, "a tiny model, one round, some seconds")
    rounds: int | None = option(None, "(5, or 1 with --quick)", min=1)
    gateway: bool = option(False, "measure what stands in front of the engine")
    only: str | None = option(None, "what to measure; a wrong name lists all", metavar="NAME,...")
    json: Path | None = option(None, "(benchmark.json in the working folder)", metavar="FILE")
    plot: Path | None = option(None, "(benchmark.png in the working folder)", metavar="FILE")
    workdir: Path = option(WORKDIR, "kept for later runs")
    install_peers: bool = option(False, "make .venv-benchmark, then measure nothing")
    switching: bool = _switching(False, "measure many models that do not all fit")
    models: int | None = _switching(None, "fine-tunes (8)", min=1, metavar="N")
    clients: int | None = _switching(None, "that ask them (4)", min=1, metavar="N")
    minutes: float = _switching(0.0, "for so long (300 requests)", metavar="M")
    engine_mib: int | None = _switching(
        None, "ENGINE_MEMORY_MIB (720: five fit)", min=1, metavar="N"
    )
    container_mib: int | None = _switching(None, "in a control group, by root", min=1, metavar="N")
    against: str | None = _switching(None, "and the same on another commit", metavar="COMMIT")
    sweep: bool = _switching(False, "and with less and less memory, with a plot")


def run(options: Bench) -> int:
    """Measures this server's engine side by side with others, on random models of KoGPT2's shape.

    One run measures everything in rounds, contender after contender, so that each ratio compares
    what was measured at the same time. It prints tables, and writes JSON and a plot.
    docs/benchmark.md says what each row means. The first run writes some 8 GB into the working
    folder, which later ones use.

    Examples:
    kogpt2 bench --install-peers    once: transformers, CTranslate2, llama.cpp, matplotlib
    kogpt2 bench                    everything, some minutes
    kogpt2 bench --quick            a tiny model and one round: does it run?
    kogpt2 bench --rounds 3 --only guides,onnxruntime-int8,bandwidth
    taskset -c 0,1 kogpt2 bench     on two cores
    kogpt2 bench --gateway          the gateway's own numbers instead
    kogpt2 bench --switching        eight models where five fit, and what a swap takes
    kogpt2 bench --switching --against 3e223a9 --sweep
    """
    # What was started is ended, however this ends.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.gateway:
        return measure_gateway(options)
    if options.switching:
        return measure_switching(options)
    return measure_engine(options)


def chosen(only: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """Raises `Problem` where `only` has a name that is not known."""
    wanted = tuple(only.split(",")) if only else tuple(known)
    if unknown := [name for name in wanted if name not in known]:
        raise Problem(f"--only {unknown[0]}: known are {', '.join(known)}")
    return wanted


def measure_gateway(options: Bench) -> int:
    from benchmarks.gateway import measurements as gateway

    began = time.monotonic()
    wanted = chosen(options.only, gateway.PARTS)
    workdir = options.workdir.resolve()
    print(f"working in {workdir}", file=sys.stderr)
    plan = gateway.Plan.quick() if options.quick else gateway.Plan()
    results = gateway.measure(plan, wanted, workdir)
    results["seconds"] = time.monotonic() - began
    file = options.json or workdir / "gateway.json"
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(gateway.lines(results)))
    print(f"\n{file}, {results['seconds']:.0f} s in all")
    return 1 if results["skipped"] else 0


def measure_switching(options: Bench) -> int:
    from benchmarks.contenders import peers
    from benchmarks.switching import measurements as switching

    began = time.monotonic()
    wanted = chosen(options.only, switching.PARTS) if options.only else switching.DEFAULT
    if options.sweep and "sweep" not in wanted:
        wanted = (*wanted, "sweep")
    workdir = options.workdir.resolve()
    print(f"working in {workdir}", file=sys.stderr)
    plan = switching.Plan.quick() if options.quick else switching.Plan()
    names = ("models", "clients", "minutes", "engine_mib", "container_mib", "rounds")
    given = {name: value for name in names if (value := getattr(options, name))}
    plan = dataclasses.replace(plan, **given)
    file = options.json or workdir / "switching.json"

    def save(results: dict[str, Any]) -> None:
        results["seconds"] = time.monotonic() - began
        file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    results = switching.measure(plan, wanted, workdir, options.against, save)
    save(results)
    print("\n".join(switching.lines(results)))
    if "sweep" in results:
        peers.draw(file, options.plot or workdir / "switching.png", "switching_plot")
    print(f"\n{file}, {results['seconds']:.0f} s in all")
    return 1 if set(results["skipped"]) - set(peers.MODULES) else 0


def measure_engine(options: Bench) -> int:
    from benchmarks.contenders import peers
    from benchmarks.engine import measurements
    from benchmarks.process import BenchmarkError
    from benchmarks.report import goals, tables

    began = time.monotonic()
    known = (*measurements.SPEED, *measurements.PARTS)
    wanted = chosen(options.only, known)
    if options.install_peers:
        peers.install()
        return 0
    workdir = options.workdir.resolve()
    print(f"working in {workdir}", file=sys.stderr)
    plan = measurements.Plan.quick() if options.quick else measurements.Plan()
    if options.rounds:
        plan = dataclasses.replace(plan, rounds=options.rounds)
    results = measurements.Run(plan, wanted, workdir).measure()
    results["goals"] = list(goals.goals(results))
    results["seconds"] = time.monotonic() - began
    file = options.json or workdir / "benchmark.json"
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(tables.lines(results)))
    plot = options.plot or workdir / "benchmark.png"
    try:
        peers.draw(file, plot)
        print(f"\n{file}, {plot}, {results['seconds']:.0f} s in all")
    except BenchmarkError as error:
        print(f"\n{file}, {results['seconds']:.0f} s in all; {error}")
        if options.plot:
            return 1
    return 1 if set(results["skipped"]) - set(peers.MODULES) else 0
