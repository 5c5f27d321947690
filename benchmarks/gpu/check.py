"""`kogpt2 gpu-check`: compares both backends on the GPU with fp32 on the CPU, a process each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.process import WORKDIR, Worker
from command.documents import check_writable, write_json
from command.options import option
from testbed.process import ProgramError

if TYPE_CHECKING:
    from engine.artifacts.config import GPT2Config

BACKENDS = {"mxnet": "fp32", "onnxruntime": "fp16"}  # on a GPU
DEMO_MODELS = {
    "sowol": ("나 보기가 역겨워", "산에는 꽃 피네", "엄마야 누나야"),
    "dongju": ("죽는 날까지 하늘을 우러러", "계절이 지나가는 하늘에는", "산모퉁이를 돌아"),
}


@dataclass(kw_only=True)
class GpuCheck:
    device: Literal["gpu", "cpu"] = option("gpu", "where to compute")
    quick: bool = option(False, "tiny models, some seconds")
    only: Literal["mxnet", "onnxruntime"] | None = option(None, "one backend")
    json: Path | None = option(None, "(gpu_check.json in the working folder)", metavar="FILE")
    workdir: Path = option(WORKDIR, "kept for later runs")


@dataclass(frozen=True)
class Plan:
    config: GPT2Config
    models: int = 8
    rows: int = 32
    prompt_tokens: int = 16
    new_tokens: int = 64
    rounds: int = 3


def run(options: GpuCheck) -> int:
    """Check and measure both backends on this machine's GPU, against fp32 on its CPU.

    Prints a table for the documentation and fails where a result is not what it must be. The first
    run writes random models of KoGPT2's shape, 4 GB, into the working folder, which later ones use.
    docs/deploy/gpu.md says what it checks.

    Examples:
    kogpt2 gpu-check                        both backends on the GPU, some minutes
    kogpt2 gpu-check --only onnxruntime
    kogpt2 gpu-check --device cpu --quick   does it run? on the CPU, with tiny models
    """
    from benchmarks.gpu import table as gpu_table
    from testbed import random_model

    plan = Plan(random_model.FULL)
    if options.quick:
        plan = Plan(random_model.TINY, models=2, rows=4, prompt_tokens=8, new_tokens=16, rounds=1)
    workdir = options.workdir.resolve()
    print(f"working in {workdir}", file=sys.stderr)
    workdir.mkdir(parents=True, exist_ok=True)
    file = options.json or workdir / "gpu_check.json"
    check_writable(file)
    results = measure(plan, options.device, [options.only] if options.only else BACKENDS, workdir)
    write_json(file, results)
    print("\n".join(gpu_table.lines(results)))
    failures = list(gpu_table.failures(results))
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures or results["skipped"] else 0


def measure(plan: Plan, device: str, wanted: Iterable[str], workdir: Path) -> dict[str, Any]:
    """Measure each backend; one that could not be measured is among `skipped`, with the reason.

    Raises `ProgramError` where nothing could be measured.
    """
    from testbed import random_model

    random = [str(random_model.make(workdir, plan.config, seed)) for seed in range(plan.models)]
    prompts = random_model.prompts(plan.config, plan.rows, plan.prompt_tokens)
    compared: dict[str, tuple[str, Sequence[Any]]] = {
        name: (str(random_model.demo(name, workdir)), lines) for name, lines in DEMO_MODELS.items()
    }
    compared["random"] = (random[0], prompts[:2])
    results: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    tokens = {"new_tokens": plan.new_tokens}
    for backend in wanted:
        print(f"measuring {backend} on the {device}", file=sys.stderr)
        log = workdir / f"gpu_check-{backend}.log"
        try:
            with Worker(sys.executable, "gpu.backend", [backend, device], log) as worker:
                call = worker.call
                measured: dict[str, Any] = {
                    "accuracy": {
                        name: call("compare", folder=folder, prompts=list(texts), **tokens)
                        for name, (folder, texts) in compared.items()
                    },
                    "empty_bytes": call("unload"),
                    "loads": [call("load", folder=folder) for folder in random],
                    "rows": call("rows", prompts=prompts, steps=4),
                }
                for rows in (1, plan.rows):
                    measured[f"B={rows}"] = [
                        call("generate", prompts=prompts[:rows], **tokens)["steps_s"]
                        for _ in range(plan.rounds)
                    ]
                measured["turns_tokens_per_s"] = call("turns", prompt=prompts[0], **tokens)
                measured["unloaded_bytes"] = call("unload")
                if device == "gpu" or backend == "onnxruntime":  # on a CPU, MXNet has no limit
                    call("load", folder=random[0])
                    measured["exhausted"] = call(
                        "exhaust", folder=random[1], prompt=prompts[0], **tokens
                    )
        except ProgramError as error:
            skipped[backend] = str(error)
        else:
            results[backend] = {**measured, "precision": BACKENDS[backend]}
    if not results:
        raise ProgramError("; ".join(skipped.values()))
    plan_of = dataclasses.asdict(plan)
    return {"device": device, "plan": plan_of, "backends": results, "skipped": skipped}
