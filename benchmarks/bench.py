"""`kogpt2 bench`: measures this server's engine side by side with others."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.process import WORKDIR
from command.documents import check_writable, read_text, write_json
from command.errors import Problem
from command.options import option, seconds

if TYPE_CHECKING:
    from benchmarks.report.tables import Results
    from benchmarks.run import Run

ENGINES = "benchmark"  # the run that no option names, and its files
ALONE = ("pages", "install_peers")  # options that measure nothing and take no others
ANY_RUN = ("quick", "only", "json", "workdir", "add")  # options of all runs
_kind = partial(option, False, rich_help_panel="What to measure, in place of the engine")
_switching = partial(option, rich_help_panel="For --switching, some for --adapters")


@dataclass(kw_only=True)
class Bench:
    quick: bool = option(False, "a tiny model, one round, some seconds")
    rounds: int | None = option(None, "how often to measure (5; other runs: their own)", min=1)
    only: str | None = option(None, "parts of the run; a wrong name lists all", metavar="NAME,...")
    json: Path | None = option(None, "the results (in the working folder)", metavar="FILE")
    plot: Path | None = option(None, "their plot (in the working folder)", metavar="FILE")
    workdir: Path = option(WORKDIR, "for models and logs, kept for later runs")
    add: bool = option(False, "add to the results in --json, of the same commit and plan")
    pages: bool = option(False, "write docs/develop/benchmark*.json into the pages")
    install_peers: bool = option(False, "make .venv-benchmark, then measure nothing")
    gateway: bool = _kind("the gateway, and all else in front of the engine")
    fleet: bool = _kind("one, two and three servers behind HAProxy")
    switching: bool = _kind("many models that do not all fit")
    adapters: bool = _kind("adapters (LoRA) of one base")
    forms: bool = _kind("answers that are held to a form")
    hard: bool = _kind("how exact int8 is on models with outliers")
    deltas: bool = _kind("how exact and fast deltas of fine-tunes are")
    classifiers: bool = _kind("classifiers, beside peers and over HTTP")
    cpus: float | None = option(
        None, "for --fleet: cores of each server (1), as root", parser=seconds, metavar="N"
    )
    models: int | None = _switching(None, "fine-tunes (8), or adapters (1000)", min=1, metavar="N")
    clients: int | None = _switching(None, "clients (4, or 8 for adapters)", min=1, metavar="N")
    minutes: float | None = _switching(
        None, "length of a trace (300 requests, or 2 minutes)", parser=seconds, metavar="M"
    )
    zipf: float | None = _switching(
        None, "exponent of the models' popularity (1.0)", parser=seconds, metavar="Z"
    )
    one_base: bool = _switching(False, "deltas of one base in place of whole models")
    engine_mib: int | None = _switching(
        None, "ENGINE_MEMORY_MIB (720: five fit)", min=1, metavar="N"
    )
    container_mib: int | None = _switching(
        None, "memory of a control group for the server, as root", min=1, metavar="N"
    )
    against: str | None = _switching(None, "measure another commit, too", metavar="COMMIT")
    sweep: bool = _switching(False, "measure with less and less memory, too, with a plot")


def chosen(options: Bench, kinds: Mapping[str, type[Run]]) -> str:
    """Return the kind of run that the options name, or one of `ALONE`.

    A run takes the options that its plan has as fields, and those that are parts of it. Raises
    `Problem` for any other.
    """
    takes: dict[str, set[str]] = {name: set() for name in ALONE}
    for name, kind in kinds.items():
        takes[name] = {*ANY_RUN, *kind.PARTS, *(f.name for f in dataclasses.fields(kind.PLAN))}
        if takes[name] & {"contenders", "sweep"}:
            takes[name].add("plot")
    given = [f.name for f in dataclasses.fields(Bench) if getattr(options, f.name) != f.default]
    names = [name for name in given if name in takes] or [ENGINES]
    if len(names) > 1:
        raise Problem(f"give {_flag(names[0])} or {_flag(names[1])}, not both")
    for option_name in given:
        if option_name not in {*takes[names[0]], *names}:
            fitting = ", ".join(_flag(name) for name in kinds if option_name in takes[name])
            raise Problem(f"{_flag(option_name)} is for {' or '.join(fitting.rsplit(', ', 1))}")
    return names[0]


def _flag(name: str) -> str:
    return "the run that no option names" if name == ENGINES else f"--{name.replace('_', '-')}"


def read_results(file: Path) -> Results:
    """Read what an earlier run wrote. Raises `Problem`."""
    try:
        results = json.loads(read_text(file))
    except ValueError:
        results = None
    if not isinstance(results, dict) or not {"commit", "plan", "wanted", "skipped"} <= {*results}:
        raise Problem(f"--add: {file} is no JSON of kogpt2 bench")
    return results


def run(options: Bench) -> int:
    """Measure this server's engine side by side with others, on random models of KoGPT2's shape.

    One run measures everything in rounds, contender after contender, so that each ratio compares
    what was measured at the same time. It prints tables, and writes JSON and a plot.
    docs/develop/benchmark.md says how each row is measured. The first run writes some 8 GB into the
    working folder, which later ones use.

    Examples:
    kogpt2 bench --install-peers      once: transformers, CTranslate2, llama.cpp, matplotlib
    kogpt2 bench                      everything, some minutes
    kogpt2 bench --quick              a tiny model and one round: does it run?
    kogpt2 bench --rounds 3 --only guides,int8,bandwidth
    taskset -c 0,1 kogpt2 bench       on two cores
    kogpt2 bench --only uses --add --json found.json    one part more
    kogpt2 bench --pages              docs/develop/benchmark*.json into the README and the pages
    kogpt2 bench --gateway            the gateway's own numbers instead
    kogpt2 bench --fleet              servers of one core behind HAProxy
    kogpt2 bench --fleet --cpus 0.5   three on two cores
    kogpt2 bench --switching          eight models where five fit, and what a swap takes
    kogpt2 bench --switching --against 3e223a9 --sweep
    kogpt2 bench --forms              JSON, labels and expressions
    kogpt2 bench --hard               int8's error on models with outliers, ours and peers'
    kogpt2 bench --deltas             fine-tunes as deltas of their base; trains them first
    kogpt2 bench --classifiers        lists of texts, beside peers, generators and over HTTP
    kogpt2 bench --adapters --container-mib 2048 --minutes 10    a thousand adapters of one base
    """
    from benchmarks.adapters import measurements as adapters
    from benchmarks.classifiers import measurements as classifiers
    from benchmarks.contenders import peers
    from benchmarks.deltas import measurements as deltas
    from benchmarks.engine import measurements as engine
    from benchmarks.fleet import measurements as fleet
    from benchmarks.forms import measurements as forms
    from benchmarks.gateway import measurements as gateway
    from benchmarks.hard import measurements as hard
    from benchmarks.switching import measurements as switching
    from testbed.process import Program, ProgramError

    # SIGTERM raises SystemExit, so that context managers end the child processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    kinds: dict[str, type[Run]] = {
        "gateway": gateway.GatewayRun,
        "fleet": fleet.FleetRun,
        "switching": switching.SwitchingRun,
        "adapters": adapters.AdaptersRun,
        "forms": forms.FormsRun,
        "hard": hard.HardRun,
        "deltas": deltas.DeltasRun,
        "classifiers": classifiers.ClassifiersRun,
        ENGINES: engine.EngineRun,
    }
    name = chosen(options, kinds)
    if name == "pages":
        from benchmarks.report import pages

        print(*pages.write(), sep="\n")
        return 0
    if name == "install_peers":
        peers.install()
        return 0
    kind = kinds[name]
    wanted = options.only.split(",") if options.only else [*kind.DEFAULT]
    if unknown := [part for part in wanted if part not in kind.PARTS]:
        raise Problem(f"--only {unknown[0]}: known are {', '.join(kind.PARTS)}")
    if options.sweep and "sweep" not in wanted:
        wanted.append("sweep")
    plan = kind.PLAN
    if options.quick:
        plan, Program.backend = kind.QUICK, "native"
    given = {f.name: vars(options).get(f.name) for f in dataclasses.fields(plan)}
    plan = dataclasses.replace(plan, **{name: value for name, value in given.items() if value})
    workdir = options.workdir.resolve()
    print(f"working in {workdir}", file=sys.stderr)
    measured = kind(plan, wanted, workdir)
    file = options.json or workdir / f"{name}.json"
    plot = options.plot or workdir / f"{name}.png"
    for written in (file, plot):
        check_writable(written)
    if options.add and file.exists():
        measured.add_to(read_results(file))
    results = measured.results
    began -= results.get("seconds", 0.0)

    def save() -> None:
        results["seconds"] = time.monotonic() - began
        write_json(file, results)

    measured.measure(save)
    save()
    print(f"{kind.LINES(results)}\n\n{file}, {results['seconds']:.0f} s in all")
    if "sweep" in results or results.get("contenders"):
        try:
            peers.draw(file, plot, measured.log("plot"))
            print(plot)
        except ProgramError as error:
            print(f"no plot: {error}", file=sys.stderr)
            if options.plot:
                return 1
    return 1 if set(results["skipped"]) - peers.NAMES else 0
