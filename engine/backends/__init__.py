"""Which backend runs a model, and what each can compute in."""

from __future__ import annotations

import importlib
from pathlib import Path

from common.errors import InvalidRequest
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import KOGPT2, GPT2Config
from engine.backends.interface import BackendModel
from engine.prepared import int8
from engine.prepared.manifest import Run, directly

BACKENDS = ("mxnet", "onnxruntime")
_MODULES = {"mxnet": "mxnet.model", "onnxruntime": "onnx.cpu"}
DEVICES = ("cpu", "gpu")
KV_SHARE = {"fp16": 2, "int8-kv8": 4}  # of fp32's keys and values others have


def precisions(backend: str, device: str) -> tuple[str, ...]:
    """What a backend can compute in on a device, its default first."""
    if backend == "mxnet":
        return ("fp32", "int8") if device == "cpu" else ("fp32",)
    return ("fp16",) if device == "gpu" else ("int8", "int8-kv8", "fp32")


def check(backend: str, precision: str, device: str) -> None:
    """Raises `InvalidRequest` for what no backend computes."""
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
    if precision not in precisions(backend, device):
        raise InvalidRequest(
            f"precision is {precision!r}, must be one of {', '.join(precisions(backend, device))}"
            f" for backend {backend} on the {device}"
        )
    if precision == "int8-kv8":
        from engine.backends.onnx import int8_kv

        int8_kv.check()


def weight_bytes(config: GPT2Config, backend: str, precision: str) -> int:
    """What a model's weights will take, for admission before anything is allocated."""
    if precision.startswith("int8"):
        if backend == "mxnet":
            return int8.num_bytes(config)
        # A byte each, a scale for 64, and the packed form's own; the fp32 tables are page cache.
        return config.num_parameters * 6 // 5
    return (2 if precision == "fp16" else 4) * config.num_parameters


def row_bytes(config: GPT2Config, precision: str) -> int:
    """What the keys and values of one row of full context will take."""
    return config.max_length * config.kv_bytes_per_token // KV_SHARE.get(precision, 1)


def is_prepared(backend: str, precision: str, device: str) -> bool:
    """Whether its models are kept on the disk in a form of their own (`engine.prepared`)."""
    return device == "cpu" and (backend, precision) != ("mxnet", "fp32")


def preloaded(backend: str, device: str) -> tuple[str, ...]:
    """Modules that a sandbox needs to prepare a model, which take it a tenth of a second."""
    return ("engine.prepared.build",) if (backend, device) == ("onnxruntime", "cpu") else ()


def import_backend(backend: str) -> None:
    """Imports a backend's library ahead of its first use: MXNet costs 1.2 s and 276 MB.

    Raises `InvalidRequest` where a library that it needs is missing.
    """
    try:
        importlib.import_module(f"engine.backends.{_MODULES[backend]}")
    except OSError as error:  # a shared library; MXNet's GPU build wants the driver on a CPU, too
        raise InvalidRequest(
            f"backend {backend} cannot be used here: {error}; where it is a build for GPUs, is"
            " NVIDIA's driver there (docker run --gpus all)?"
        ) from None


def warm_up(backend: str, precision: str, *, device: str, cache_dir: Path | None, run: Run) -> None:
    """Does what the first model of KoGPT2's shape would wait for. Raises as `load` does."""
    if (backend, precision, device) == ("onnxruntime", "int8", "cpu"):
        from engine.backends.onnx import warm_up

        warm_up.warm_up(KOGPT2, precision, cache_dir, run)


def load(
    artifact: Artifact,
    backend: str,
    precision: str,
    *,
    device: str = "cpu",
    cache_dir: Path | None = None,
    run: Run = directly,
) -> BackendModel:
    """Loads a model; `run` does what may take long or go wrong with its files.

    Raises `ArtifactError`, `OutOfMemory`, and what `check` does.
    """
    check(backend, precision, device)
    if (backend, precision) == ("mxnet", "int8"):
        from engine.backends.mxnet import int8_model

        return int8_model.load(artifact, cache_dir=cache_dir, run=run)
    if backend == "mxnet":
        from engine.backends.mxnet import model as mxnet_model

        return mxnet_model.load(artifact, device=device)
    if device == "gpu":
        from engine.backends.onnx import gpu

        return gpu.load(artifact)
    from engine.backends.onnx import cpu

    return cpu.load(artifact, precision, cache_dir=cache_dir, run=run)
