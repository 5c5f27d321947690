"""The backends and precisions of each device; loads models on them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from common.errors import InvalidRequest
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends.interface import BackendModel
from engine.native import library, prepared
from engine.prepared.manifest import Run, directly

# By device and backend: the module with `run_pass` on a CPU, with `load` on a GPU; the precisions.
_BACKENDS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "cpu": {
        "mxnet": ("engine.native.mxnet_operator", ("int8", "fp32")),
        "native": ("engine.native.library", ("int8", "fp32")),
    },
    "gpu": {
        "mxnet": ("engine.backends.mxnet.model", ("fp32",)),
        "onnxruntime": ("engine.backends.onnx.gpu", ("fp16",)),
    },
}
DEVICES = tuple(_BACKENDS)


def precisions(backend: str, device: str) -> tuple[str, ...]:
    """The precisions of a backend on a device, the default first. Raises `InvalidRequest`."""
    known = _BACKENDS[device]
    if backend not in list(known):  # `in` of the dict would fail for a JSON list
        raise InvalidRequest(
            f"backend is {backend!r}, must be one of {', '.join(known)} on the {device}"
        )
    return known[backend][1]


def check(backend: str, precision: str, device: str) -> None:
    """Raise `InvalidRequest` for a backend or precision that does not exist on the device."""
    known = precisions(backend, device)
    if precision not in known:
        raise InvalidRequest(
            f"precision is {precision!r}, must be one of {', '.join(known)} for backend {backend}"
            f" on the {device}"
        )


def weight_bytes(config: GPT2Config, precision: str, device: str) -> int:
    """Return the bytes of a model's weights, for admission before they are allocated."""
    if device == "cpu":
        return prepared.num_bytes(config, precision)
    return (2 if precision == "fp16" else 4) * config.num_parameters


def row_bytes(config: GPT2Config, precision: str) -> int:
    """Return the K/V bytes of a row of full context, whose numbers have the model's precision."""
    pages = -(-config.max_length // library.PAGE_TOKENS)
    if precision == "fp16":  # on a GPU
        return pages * library.page_bytes(config, "fp32") // 2
    return pages * library.page_bytes(config, precision)


def import_backend(backend: str, device: str) -> Any:
    """Import and return a backend's module (1.2 s for MXNet). Raises `InvalidRequest`."""
    precisions(backend, device)
    try:
        return importlib.import_module(_BACKENDS[device][backend][0])
    except OSError as error:  # a missing library; MXNet's GPU build needs the driver on a CPU, too
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
    """Load a model; `run` does the long or risky work on its files. Raises `EngineError`."""
    check(backend, precision, device)
    module = import_backend(backend, device)
    if device == "cpu":
        from engine.native.model import NativeModel

        return NativeModel(prepared.prepared(artifact, precision, cache_dir, run), module.run_pass)
    model: BackendModel = module.load(artifact)
    return model
