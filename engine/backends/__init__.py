"""Chooses the backend of a model, and knows what each can compute in."""

from __future__ import annotations

import importlib
from pathlib import Path

from common.errors import InvalidRequest
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends.interface import BackendModel
from engine.native import library, prepared
from engine.prepared.manifest import Run, directly

DEVICES = ("cpu", "gpu")
_CPU_PRECISIONS = ("int8", "fp32")
_GPU_PRECISIONS = {"mxnet": ("fp32",), "onnxruntime": ("fp16",)}
_MODULES = {
    ("mxnet", "cpu"): "engine.native.mxnet_operator",
    ("native", "cpu"): "engine.native.model",
    ("mxnet", "gpu"): "engine.backends.mxnet.model",
    ("onnxruntime", "gpu"): "engine.backends.onnx.gpu",
}


def precisions(backend: str, device: str) -> tuple[str, ...]:
    """The precisions of a backend on a device, its default first.

    Raises `InvalidRequest` for a backend that does not exist on the device.
    """
    known = [name for name, of_device in _MODULES if of_device == device]
    if backend not in known:
        raise InvalidRequest(
            f"backend is {backend!r}, must be one of {', '.join(known)} on the {device}"
        )
    return _CPU_PRECISIONS if device == "cpu" else _GPU_PRECISIONS[backend]


def check(backend: str, precision: str, device: str) -> None:
    """Raise `InvalidRequest` for a backend or precision that does not exist on the device."""
    known = precisions(backend, device)
    if precision not in known:
        raise InvalidRequest(
            f"precision is {precision!r}, must be one of {', '.join(known)} for backend {backend}"
            f" on the {device}"
        )


def weight_bytes(config: GPT2Config, precision: str, device: str) -> int:
    """Bytes of a model's weights, for admission before they are allocated."""
    if device == "cpu":
        return prepared.num_bytes(config, precision)
    return (2 if precision == "fp16" else 4) * config.num_parameters


def row_bytes(config: GPT2Config, precision: str) -> int:
    """K/V bytes of a row of full context, in fp32 or else fp16."""
    pages = -(-config.max_length // library.PAGE_TOKENS)
    fp32 = pages * library.PAGE_TOKENS * config.kv_bytes_per_token
    return fp32 if precision == "fp32" else fp32 // 2


def import_backend(backend: str, device: str) -> None:
    """Import a backend's library before its first use: MXNet costs 1.2 s and 276 MB.

    Raises `InvalidRequest` where a library that it needs is missing.
    """
    precisions(backend, device)
    try:
        importlib.import_module(_MODULES[backend, device])
    except OSError as error:  # a shared library; MXNet's GPU build wants the driver on a CPU, too
        raise InvalidRequest(
            f"backend {backend} cannot be used here: {error}; where it is a build for GPUs, is"
            " NVIDIA's driver there (docker run --gpus all)?"
        ) from None


def load(
    artifact: Artifact,
    backend: str,
    precision: str,
    *,
    device: str = "cpu",
    cache_dir: Path | None = None,
    run: Run = directly,
) -> BackendModel:
    """Load a model; `run` runs the long or risky work on its files.

    Raises `ArtifactError`, `OutOfMemory`, and what `check` does.
    """
    check(backend, precision, device)
    if device == "cpu":
        from engine.native.model import NativeModel

        run_pass = library.run_pass
        if backend == "mxnet":
            from engine.native import mxnet_operator

            run_pass = mxnet_operator.run_pass
        return NativeModel(prepared.prepared(artifact, precision, cache_dir, run), run_pass)
    if backend == "mxnet":
        from engine.backends.mxnet import model as mxnet_model

        return mxnet_model.load(artifact)
    from engine.backends.onnx import gpu

    return gpu.load(artifact)
