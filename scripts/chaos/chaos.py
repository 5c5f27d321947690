"""Faults over a running server, and what its clients see of them."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.chaos.clients import PAUSE_S
from scripts.chaos.plan import KINDS, Fault, Plan
from scripts.lib.problem import Failed, Problem
from scripts.options import option, seconds

MIN_SOAK_MINUTES = 1.0  # a sample each 10 s, and its sixths are compared
_soak = partial(option, rich_help_panel="Soak and recovery")


@dataclass(kw_only=True)
class Chaos:
    seed: int = option(0, "of the plan and of what clients do; odd ones as on SageMaker")
    minutes: float = option("1", "of faults", parser=seconds, metavar="M")
    every: float = option("5", "seconds between faults, on average", parser=seconds, metavar="S")
    clients: int = option(8, "at once", min=1, metavar="N")
    pause: float = option(
        str(PAUSE_S), "seconds after each answer, on average", parser=seconds, metavar="S"
    )
    only: str | None = option(None, "kinds of faults; a wrong one lists all", metavar="KIND,...")
    plan: Path | None = option(None, "to repeat, instead of one from the seed", metavar="FILE")
    image: str = option("", "the server as a container of it", metavar="NAME")
    heal: float = option(
        1.0, "how much longer than a quiet machine this one may take", min=1, metavar="X"
    )
    out: Path = option(Path("chaos"), "for the plan, the history and the log", metavar="FOLDER")
    shrink: int = option(8, "runs to find the shortest plan that shows a fault", min=0, metavar="N")
    soak: bool = _soak(False, "100 models in the room of 20, a fault a minute: what grows?")
    models: int = _soak(100, "of the soak", min=10, metavar="N")
    recovery: int | None = _soak(
        None, "kill each kind of process so often, and measure", min=1, metavar="N"
    )


def run(options: Chaos) -> int:
    """Breaks a server of its own in all the ways that can be thought of, and checks what its
    clients were told.

    Tiny models in a store (moto); clients that ask, stream, load, unload and hang up all the time;
    a fault every few seconds: processes killed and stopped, full disks, a store that fails, less
    memory, slow connections. A checker reads the complete history: each request answered once, by
    the right model and version with the right text, or with an error that is true; what was loaded
    is there, what was unloaded is gone; nothing after its deadline; all parts agree when it is
    quiet; nothing is left. It fails where that does not hold, and prints the seed and the shortest
    plan that still shows it. docs/develop/chaos.md has the rules.

    What this machine does not allow is skipped and said: full disks need mounts.

    Examples:
    kogpt2 chaos                            a minute
    kogpt2 chaos --seed 3 --minutes 30
    kogpt2 chaos --only "kill engine,kill gateway" --every 2
    kogpt2 chaos --plan chaos/plan.json     again
    kogpt2 chaos --image kogpt2-serving:cpu
    kogpt2 chaos --soak --minutes 60 --clients 16
    kogpt2 chaos --recovery 20              how long each process is missed
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.out.mkdir(parents=True, exist_ok=True)
    if options.recovery:
        return measure_recovery(options.recovery, options.out)
    if options.soak:
        if options.minutes < MIN_SOAK_MINUTES:
            raise Problem(
                f"--minutes is {options.minutes:g}, a soak needs {MIN_SOAK_MINUTES:g} at least"
            )
        return soak(options)
    kinds = options.only.split(",") if options.only else list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise Problem(f"--only {unknown[0]}: known are {', '.join(KINDS)}")
    drawn = Plan.draw(options.seed, 60 * options.minutes, options.every, kinds)
    return break_it(Plan.read(options.plan) if options.plan else drawn, options)


def break_it(plan: Plan, options: Chaos) -> int:
    """Raises `Failed` where what clients saw was not right."""
    from scripts.chaos import report
    from scripts.chaos.run import Size
    from scripts.chaos.run import run as carry_out
    from scripts.chaos.shrink import shortest

    size = Size(options.clients, heal=options.heal, pause_s=options.pause, image=options.image)
    first = carry_out(plan, size, _say)
    report.write(options.out, plan, first)
    print("\n".join(report.lines(first)))
    if not first.violations:
        return 0
    left = options.shrink

    def shows(faults: list[Fault]) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            return False
        return bool(carry_out(replace(plan, faults=tuple(faults)), size, _say).violations)

    found = plan.faults if not left else tuple(shortest(plan.faults, shows))
    replace(plan, faults=found).write(options.out / "shortest.json")
    print(f"seed {plan.seed}; these show it ({options.out / 'shortest.json'}):")
    for fault in found:
        print(f"  {fault.at_s:7.2f} s  {fault.kind}")
    raise Failed("what clients saw was not right")


def soak(options: Chaos) -> int:
    from benchmarks.process import ROOT
    from benchmarks.run import commit
    from scripts.chaos import report, soak
    from scripts.chaos.run import run as carry_out
    from scripts.chaos.system import System

    taken: list[soak.Samples] = []

    def sampling(system: System) -> soak.Samples:
        taken.append(soak.Samples(system))
        return taken[0]

    plan = soak.plan(options.seed, options.minutes)
    size = soak.size(options.clients, options.models, options.heal, options.pause)
    result = carry_out(plan, size, _say, sampling)
    report.write(options.out, plan, result)
    print("\n".join(report.lines(result)))
    results = soak.results(taken[0], result, commit(ROOT))
    print("\n".join(soak.lines(results)))
    _written(options.out / "soak.json", results)
    if much := soak.grown(results["judged"]):
        _say(f"grown too much: {', '.join(much)}")
    return 1 if result.violations or much else 0


def measure_recovery(rounds: int, out: Path) -> int:
    from benchmarks.process import ROOT
    from benchmarks.run import commit
    from scripts.chaos import recovery

    results = {"commit": commit(ROOT), **recovery.measure(rounds, _say)}
    print(recovery.lines(results))
    _written(out / "recovery.json", results)
    return 0


def _written(file: Path, results: dict[str, Any]) -> None:
    from benchmarks.contenders import peers
    from benchmarks.process import BenchmarkError

    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        peers.draw(file, file.with_suffix(".png"), file.with_suffix(".log"), "scripts.chaos.plot")
    except BenchmarkError as error:
        _say(str(error))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
