"""Both backends on this machine's GPU, against fp32 on its CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.process import WORKDIR
from command.options import option


@dataclass(kw_only=True)
class GpuCheck:
    device: Literal["gpu", "cpu"] = option("gpu", "where to compute")
    quick: bool = option(False, "tiny models, some seconds")
    only: Literal["mxnet", "onnxruntime"] | None = option(None, "one backend")
    json: Path | None = option(None, "(gpu_check.json in the working folder)", metavar="FILE")
    workdir: Path = option(WORKDIR, "kept for later runs")


def run(options: GpuCheck) -> int:
    """Checks and measures both backends on this machine's GPU, against fp32 on its CPU.

    Prints a table for the documentation and fails where a result is not what it must be. The first
    run writes random models of KoGPT2's shape, 4 GB, into the working folder, which later ones use.
    docs/deploy/gpu.md says what it checks.

    Examples:
    kogpt2 gpu-check                        both backends on the GPU, some minutes
    kogpt2 gpu-check --only onnxruntime
    kogpt2 gpu-check --device cpu --quick   does it run? on the CPU, with tiny models
    """
    from benchmarks.gpu import table as gpu_table
    from benchmarks.gpu.measurements import BACKENDS, Plan, measure

    plan = Plan.quick() if options.quick else Plan()
    workdir = options.workdir.resolve()
    print(f"working in {workdir}", file=sys.stderr)
    wanted = [options.only] if options.only else list(BACKENDS)
    workdir.mkdir(parents=True, exist_ok=True)
    results = measure(plan, options.device, wanted, workdir)
    file = options.json or workdir / "gpu_check.json"
    file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(gpu_table.lines(results)))
    failures = list(gpu_table.failures(results))
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures or results["skipped"] else 0
