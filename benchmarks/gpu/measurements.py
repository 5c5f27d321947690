"""What kogpt2 gpu-check measures: each backend in a process of its own, one after the other."""

from __future__ import annotations

import dataclasses
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import random_model
from benchmarks.process import ROOT, BenchmarkError, Process
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
    """Raises `BenchmarkError` where nothing could be measured; a backend that could not is among
    `skipped`, with the reason."""
    random = [str(random_model.make(workdir, plan.config, seed)) for seed in range(plan.models)]
    demo = {name: str(_unpack(name, workdir)) for name in DEMO_MODELS}
    found: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for backend in wanted:
        print(f"measuring {backend} on the {device}", file=sys.stderr)
        try:
            with _process(backend, device, workdir) as process:
                found[backend] = _measure(plan, process, backend, device, random, demo)
        except BenchmarkError as error:
            skipped[backend] = str(error)
    if not found:
        raise BenchmarkError("; ".join(skipped.values()))
    return {
        "device": device,
        "plan": dataclasses.asdict(plan),
        "backends": found,
        "skipped": skipped,
    }


@contextmanager
def _process(backend: str, device: str, workdir: Path) -> Iterator[Process]:
    log = workdir / f"gpu_check-{backend}.log"
    process = Process(sys.executable, "gpu.backend", [backend, device], log)
    try:
        yield process
    finally:
        process.close()


def _measure(
    plan: Plan,
    process: Process,
    backend: str,
    device: str,
    random: list[str],
    demo: dict[str, str],
) -> dict[str, Any]:
    prompts = random_model.prompts(plan.config, plan.rows, plan.prompt_tokens)
    found: dict[str, Any] = {"precision": BACKENDS[backend]}
    found["accuracy"] = {
        name: process.call(
            "compare", folder=demo[name], prompts=list(lines), new_tokens=plan.new_tokens
        )
        for name, lines in DEMO_MODELS.items()
    }
    found["accuracy"]["random"] = process.call(
        "compare", folder=random[0], prompts=prompts[:2], new_tokens=plan.new_tokens
    )
    found["empty_bytes"] = process.call("unload")
    found["loads"] = [process.call("load", folder=folder) for folder in random]
    found["rows"] = process.call("rows", prompts=prompts, steps=4)
    for rows in (1, plan.rows):
        found[f"B={rows}"] = [
            process.call("generate", prompts=prompts[:rows], new_tokens=plan.new_tokens)["steps_s"]
            for _ in range(plan.rounds)
        ]
    found["turns_tokens_per_s"] = process.call(
        "turns", prompt=prompts[0], new_tokens=plan.new_tokens
    )
    found["unloaded_bytes"] = process.call("unload")
    if device == "gpu" or backend == "onnxruntime":  # MXNet would fill the machine's memory
        process.call("load", folder=random[0])
        found["exhausted"] = process.call(
            "exhaust", folder=random[1], prompt=prompts[0], new_tokens=plan.new_tokens
        )
    return found


def _unpack(name: str, workdir: Path) -> Path:
    folder = workdir / name
    folder.mkdir(exist_ok=True)
    with tarfile.open(ROOT / "model_store" / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder
