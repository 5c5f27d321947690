"""Describes the machine and the commit of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("numpy", "mxnet", "onnxruntime", "sentencepiece", "multi-model-server", "uvicorn")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def instruction_sets() -> list[str]:
    """Return the AVX and AMX instruction sets that this processor has, by names in cpuinfo."""
    flags = _cpu_info().get("flags", "").split()
    return [name for name in INSTRUCTION_SETS if name in flags]


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu_info().get("model name", platform.machine()),
        "instruction_sets": instruction_sets(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "load_average_before": os.getloadavg()[0],
    }


def _cpu_info() -> dict[str, str]:
    """Parse /proc/cpuinfo: `key: value` lines for each processor, of which the first counts."""
    results: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        results.setdefault(key.strip(), value.strip())
    return results


def lines(machine: dict[str, Any]) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    sets = ", ".join(machine["instruction_sets"])
    load, cores = machine["load_average_before"], machine["cores"]
    busy = f"; **not quiet: a load average of {load:.1f} before**" if load > cores / 4 else ""
    return [
        f"{cores} cores of {machine['cpu']} ({sets}),"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}{busy}",
        f"Python {machine['python']}, {packages}",
    ]


def commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "no git"
