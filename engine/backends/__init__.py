"""The small interface behind which each backend runs one model.

A backend computes; it knows nothing of requests, sampling or fairness. The rows of a running batch
are 0..rows-1 without holes. Rows may have different lengths. All calls for one model come from one
thread, one at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.artifacts import Artifact
from engine.config import GPT2Config
from engine.errors import InvalidRequest
from engine.manifest import Run, directly
from engine.page_cache import Span

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]

BACKENDS = ("mxnet", "onnxruntime")
_MODULES = {"mxnet": "mxnet_backend", "onnxruntime": "onnx_backend"}
DEVICES = ("cpu", "gpu")


class BackendModel(Protocol):
    """One loaded model and the K/V cache of its running batch."""

    config: GPT2Config
    weight_bytes: int  # resident bytes of the weights
    kv_bytes_per_token: int  # of the cache
    max_rows: int
    mapped: list[Span]  # its weights, where they are mapped files; empty where they are its memory

    def add_row(self) -> int:
        """Opens an empty row behind the last one; returns its index."""

    def extend(self, row: int, ids: Ids) -> Logits:
        """Prefill: appends `ids` (T,) to one row; returns the logits (V,) after the last."""

    def decode(self, ids: Ids) -> Logits:
        """Appends ids[i] to row i for the first B = len(ids) rows; returns their logits (B, V).

        The array may be reused by the next call. Rows from B on are left as they are.
        """

    def move_row(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """An empty row `target` becomes what the first `length` tokens of row `source` are."""

    def remove_last_row(self) -> None:
        """Closes the last row and gives back its memory."""

    def length(self, row: int) -> int:
        """How many tokens the row's cache holds."""

    def kv_bytes_for(self, lengths: Sequence[int]) -> int:
        """What the cache will take once the rows that are open now have grown to `lengths`."""

    @property
    def kv_bytes(self) -> int:
        """Resident bytes of keys and values."""

    def close(self) -> None:
        """Frees everything; the model cannot be used afterwards."""


def precisions(backend: str, device: str) -> tuple[str, ...]:
    """What a backend can compute in on a device, its default first."""
    if backend == "mxnet":
        return ("fp32",)
    return ("fp16",) if device == "gpu" else ("int8", "fp32")


def check(backend: str, precision: str, device: str) -> None:
    """Raises `InvalidRequest` for what no backend computes."""
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
    if precision not in precisions(backend, device):
        raise InvalidRequest(
            f"precision is {precision!r}, must be one of {', '.join(precisions(backend, device))}"
            f" for backend {backend} on the {device}"
        )


def weight_bytes(config: GPT2Config, backend: str, precision: str) -> int:
    """What a model's weights will take, for admission before anything is allocated."""
    if precision == "int8":
        # A byte each, a scale for 64, and the packed form's own; the fp32 tables are page cache.
        return config.num_parameters * 6 // 5
    return (2 if precision == "fp16" else 4) * config.num_parameters


def row_bytes(config: GPT2Config, precision: str) -> int:
    """What the keys and values of one row of full context will take."""
    return config.max_length * config.kv_bytes_per_token // (2 if precision == "fp16" else 1)


def preloaded(backend: str, device: str) -> tuple[str, ...]:
    """Modules that a sandbox needs to prepare a model, which take it a tenth of a second."""
    return ("engine.packing",) if (backend, device) == ("onnxruntime", "cpu") else ()


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
    if backend == "mxnet":
        from engine.backends import mxnet_backend

        return mxnet_backend.load(artifact, device=device)
    if device == "gpu":
        from engine.backends import onnx_gpu_backend

        return onnx_gpu_backend.load(artifact)
    from engine.backends import onnx_backend

    return onnx_backend.load(artifact, precision, cache_dir=cache_dir, run=run)
