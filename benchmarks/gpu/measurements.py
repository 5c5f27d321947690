"""What kogpt2 gpu-check measures: each backend in a process of its own, one after the other."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import random_model
from benchmarks.process import BenchmarkError, Worker
from engine.artifacts.config import GPT2Config

BACKENDS = {"mxnet": "fp32", "onnxruntime": "fp16"}  # on a GPU
DEMO_MODELS = {
    "sowol": ("나 보기가 역겨워", "산에는 꽃 피네", "엄마야 누나야"),
    "dongju": ("죽는 날까지 하늘을 우러러", "계절이 지나가는 하늘에는", "산모퉁이를 돌아"),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    config: GPT2Config = random_model.FULL
    models: int = 8
    rows: int = 32
    prompt_tokens: int = 16
    new_tokens: int = 64
    rounds: int = 3

    @classmethod
    def quick(cls) -> Plan:
        return cls(random_model.TINY, models=2, rows=4, prompt_tokens=8, new_tokens=16, rounds=1)


def measure(plan: Plan, device: str, wanted: Sequence[str], workdir: Path) -> dict[str, Any]:
    """Measure each backend; one that could not be measured is among `skipped`, with the reason.

    Raises `BenchmarkError` where nothing could be measured.
    """
    random = [str(random_model.make(workdir, plan.config, seed)) for seed in range(plan.models)]
    prompts = random_model.prompts(plan.config, plan.rows, plan.prompt_tokens)
    compared: dict[str, tuple[str, Sequence[Any]]] = {
        name: (str(random_model.demo(name, workdir)), lines) for name, lines in DEMO_MODELS.items()
    }
    compared["random"] = (random[0], prompts[:2])
    results: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for backend in wanted:
        print(f"measuring {backend} on the {device}", file=sys.stderr)
        # MXNet would fill the machine's memory
        exhaust = device == "gpu" or backend == "onnxruntime"
        log = workdir / f"gpu_check-{backend}.log"
        try:
            with Worker(sys.executable, "gpu.backend", [backend, device], log) as worker:
                results[backend] = _measure(plan, worker, random, prompts, compared, exhaust)
        except BenchmarkError as error:
            skipped[backend] = str(error)
            continue
        results[backend]["precision"] = BACKENDS[backend]
    if not results:
        raise BenchmarkError("; ".join(skipped.values()))
    plan_of = dataclasses.asdict(plan)
    return {"device": device, "plan": plan_of, "backends": results, "skipped": skipped}


def _measure(
    plan: Plan,
    worker: Worker,
    random: list[str],
    prompts: list[list[int]],
    compared: dict[str, tuple[str, Sequence[Any]]],
    exhaust: bool,
) -> dict[str, Any]:
    tokens = {"new_tokens": plan.new_tokens}
    results: dict[str, Any] = {
        "accuracy": {
            name: worker.call("compare", folder=folder, prompts=list(texts), **tokens)
            for name, (folder, texts) in compared.items()
        },
        "empty_bytes": worker.call("unload"),
        "loads": [worker.call("load", folder=folder) for folder in random],
        "rows": worker.call("rows", prompts=prompts, steps=4),
    }
    for rows in (1, plan.rows):
        results[f"B={rows}"] = [
            worker.call("generate", prompts=prompts[:rows], **tokens)["steps_s"]
            for _ in range(plan.rounds)
        ]
    results["turns_tokens_per_s"] = worker.call("turns", prompt=prompts[0], **tokens)
    results["unloaded_bytes"] = worker.call("unload")
    if exhaust:
        worker.call("load", folder=random[0])
        results["exhausted"] = worker.call("exhaust", folder=random[1], prompt=prompts[0], **tokens)
    return results
