"""Injects faults into a server and checks what its clients observe: `python -m tests.chaos`."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from command import program
from command.errors import Failed, Problem
from command.options import option, seconds
from tests.chaos.plan import KINDS, Plan

MIN_SOAK_MINUTES = 1.0  # six samples, one every 10 s, of which the sixths are compared
_soak = partial(option, rich_help_panel="Soak and recovery")


@dataclass(kw_only=True)
class Chaos:
    seed: int = option(0, "of the plan and the clients; an odd one sets SAGEMAKER_MULTI_MODEL")
    minutes: float = option("1", "how long faults are injected", parser=seconds, metavar="M")
    every: float = option("5", "seconds between faults, on average", parser=seconds, metavar="S")
    clients: int = option(8, "concurrent clients", min=1, metavar="N")
    only: str | None = option(None, "kinds of faults; an unknown one lists all", metavar="KIND,...")
    plan: Path | None = option(None, "repeat this plan instead of drawing one", metavar="FILE")
    image: str = option("", "run the server as a container of this image", metavar="NAME")
    heal: float = option(
        1.0, "a factor on recovery times, for a slow or busy machine", min=1, metavar="X"
    )
    out: Path = option(Path("chaos"), "for the plan, the history and the log", metavar="FOLDER")
    soak: bool = _soak(False, "run 100 models in memory for 20, and report what grows")
    recovery: int | None = _soak(
        None, "measure recovery: kill each kind of process N times", min=1, metavar="N"
    )


def run(options: Chaos) -> int:
    """Starts a server, injects faults under load, and checks every answer.

    Tiny models are in an S3 store (moto). Clients predict, stream, load, unload and disconnect
    continuously. Every few seconds there is a fault: a process is killed or stopped, a disk is
    full, the store fails, memory shrinks, connections are slow. A checker reads the whole history:
    each request is answered once and before its deadline, with the text of the right model and
    version or with a justified error; loaded models are loaded and unloaded ones are not; all
    processes agree after the faults; no process, file or memory is left over. On a violation the
    command ends with 1. docs/develop/chaos.md has the rules.

    Faults that this machine does not allow are skipped and reported: full disks need mounts.

    Examples:
    python -m tests.chaos                            a minute
    python -m tests.chaos --seed 3 --minutes 30
    python -m tests.chaos --only "kill engine,kill gateway" --every 2
    python -m tests.chaos --plan chaos/plan.json     the same faults again
    python -m tests.chaos --image kogpt2-serving:cpu
    python -m tests.chaos --soak --minutes 60 --clients 16
    python -m tests.chaos --recovery 20              how long each process takes to recover
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.out.mkdir(parents=True, exist_ok=True)
    if options.recovery:
        return measure_recovery(options.recovery, options.out)
    if options.soak:
        if options.minutes < MIN_SOAK_MINUTES:
            raise Problem(
                f"--minutes is {options.minutes:g}, must be at least {MIN_SOAK_MINUTES:g}"
                " for --soak"
            )
        return soak(options)
    kinds = options.only.split(",") if options.only else list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise Problem(f"--only {unknown[0]}: known are {', '.join(KINDS)}")
    drawn = Plan.draw(options.seed, 60 * options.minutes, options.every, kinds)
    return inject(Plan.read(options.plan) if options.plan else drawn, options)


def inject(plan: Plan, options: Chaos) -> int:
    """Runs the plan. Raises `Failed` on a violation."""
    from tests.chaos import report
    from tests.chaos.run import Size
    from tests.chaos.run import run as run_plan

    result = run_plan(plan, Size(options.clients, heal=options.heal, image=options.image), _say)
    report.write(options.out, plan, result)
    print("\n".join(report.lines(result)))
    if count := len(result.violations):
        raise Failed(f"seed {plan.seed}: {count} violations of the rules in docs/develop/chaos.md")
    return 0


def soak(options: Chaos) -> int:
    from tests.chaos import report, soak
    from tests.chaos.run import run as run_plan
    from tests.chaos.system import System

    samples: list[soak.Samples] = []

    def sampling(system: System) -> soak.Samples:
        samples.append(soak.Samples(system))
        return samples[0]

    plan = soak.plan(options.seed, options.minutes)
    result = run_plan(plan, soak.size(options.clients, options.heal), _say, sampling)
    report.write(options.out, plan, result)
    print("\n".join(report.lines(result)))
    judged = soak.judged(samples[0].all, result.history)
    print(soak.lines(judged))
    _write(options.out / "soak.json", {"judged": judged, "samples": samples[0].all})
    return 1 if result.violations or soak.grown(judged) else 0


def measure_recovery(rounds: int, out: Path) -> int:
    from tests.chaos import recovery

    found = recovery.measure(rounds, _say)
    print(recovery.lines(found))
    _write(out / "recovery.json", {"models": recovery.MODELS, "seconds": found})
    return 0


def _write(file: Path, results: dict[str, Any]) -> None:
    from testbed import machine
    from testbed.process import ROOT

    described = {"commit": machine.commit(ROOT), "machine": machine.describe(), **results}
    file.write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


app = program.application()
program.add(app, "chaos", run)


def main(arguments: list[str] | None = None) -> int:
    return program.run(app, "python -m tests.chaos", arguments)


if __name__ == "__main__":
    sys.exit(main())
