"""Worker that measures one backend with several models on a GPU, or its GPU code on the CPU.

Commands are about the models that `load` has opened, in this order.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.contenders.ours import generate
from benchmarks.engine import accuracy
from benchmarks.worker import Clock, Started, generation
from common.errors import OutOfMemory
from engine import backends
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel, Piece
from testbed.process_tree import rollup

# The CPU stands in for a GPU of this much memory beside the weights.
CPU_LIMIT_BYTES = 256 << 20
BALLAST_BYTES = (1 << 30, 64 << 20, 4 << 20, 256 << 10, 16 << 10)


class Checked:
    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device
        self.models: list[BackendModel] = []

    def open(self, folder: str) -> BackendModel:
        artifact = open_artifact(folder)
        if self.device == "gpu":
            precision = backends.precisions(self.backend, "gpu")[0]
            return backends.load(artifact, self.backend, precision, device="gpu")
        if self.backend == "mxnet":
            from common.mxnet_compat import mx
            from engine.backends.mxnet import model as mxnet_model

            return mxnet_model.load(artifact, mx.cpu())
        from engine.backends.onnx import gpu

        return gpu.load(artifact, self._provider())

    def _provider(self) -> Any:
        from engine.backends.onnx.device import CPU, CUDA

        return CUDA if self.device == "gpu" else replace(CPU, limit_bytes=CPU_LIMIT_BYTES)

    def load(self, folder: str) -> dict[str, Any]:
        """Load one more model and run its first pass; return times and memory."""
        began = time.perf_counter()
        model = self.open(folder)
        seconds = time.perf_counter() - began
        self.models.append(model)
        row = model.open_row()
        model.run([Piece(row, range(4))])
        first_token = time.perf_counter() - began
        model.close_row(row)
        return {
            "seconds": seconds,
            "first_token_s": first_token,
            "weight_bytes": model.weight_bytes,
            "memory_bytes": self.memory_bytes(),
        }

    def unload(self) -> int | None:
        """Unload all models; return the bytes of memory in use afterwards."""
        while self.models:
            self.models.pop().close()
        return self.memory_bytes()

    def memory_bytes(self) -> int | None:
        """Return the bytes in use on the GPU (None if unknown), or on the CPU by this process."""
        if self.device == "cpu":
            return rollup(os.getpid())["Anonymous"]
        if shutil.which("nvidia-smi") is None:
            return None
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i0"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return int(answer.stdout.split()[0]) << 20

    def compare(self, folder: str, prompts: list[Any], new_tokens: int) -> dict[str, Any]:
        """Compare the backend with fp32 on the CPU."""
        return accuracy.compare(folder, prompts, new_tokens, self.open)

    def generate(self, prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        """Decode all prompts in one batch of the first model."""
        return generate(self.models[0], prompts, new_tokens, clock)

    def rows(self, prompts: list[list[int]], steps: int) -> dict[str, float]:
        """Compare the logits of rows in one batch with the same rows alone.

        Returns the largest difference and the logits' standard deviation.
        """
        model = self.models[0]
        tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, steps).tolist()

        def steps_of(prompts: list[list[int]]) -> Any:
            rows = [model.open_row() for _ in prompts]
            for row, ids in zip(rows, prompts, strict=True):
                model.run([Piece(row, ids)])
            results = [model.run([Piece(row, [t]) for row in rows]).copy() for t in tokens]
            for row in rows:
                model.close_row(row)
            return np.stack(results)  # (steps, rows, V)

        together = steps_of(prompts)
        alone = np.concatenate([steps_of([ids]) for ids in prompts], axis=1)
        worst = float(np.abs(alone - together).max())
        return {"max_difference": worst, "logits_std": float(np.std(together[0]))}

    def turns(self, prompt: list[int], new_tokens: int) -> float:
        """Return tokens per second of all models together, which decode a token each in turn."""
        rows = [model.open_row() for model in self.models]
        pairs = list(zip(self.models, rows, strict=True))
        last = [int(model.run([Piece(row, prompt)])[0].argmax()) for model, row in pairs]
        began = time.perf_counter()
        for _ in range(new_tokens):
            for i, (model, row) in enumerate(pairs):
                last[i] = int(model.run([Piece(row, [last[i]])])[0].argmax())
        seconds = time.perf_counter() - began
        for model, row in pairs:
            model.close_row(row)
        return new_tokens * len(self.models) / seconds

    def exhaust(self, folder: str, prompt: list[int], new_tokens: int) -> dict[str, bool]:
        """Fill the device until nothing fits: another model must be refused as out of memory.

        After memory is freed the first model must write what it wrote before.
        """
        before = self.generate([prompt], new_tokens, Clock())
        ballast, refused = self._fill(), False
        try:
            self.load(folder)
        except OutOfMemory:
            refused = True
        ballast.clear()
        if len(self.models) > 1:
            self.models.pop().close()
        self.load(folder)
        return {"refused": refused, "same": self.generate([prompt], new_tokens, Clock()) == before}

    def _fill(self) -> list[Any]:
        allocate = self._mxnet_allocator() if self.backend == "mxnet" else self._onnx_allocator()
        ballast: list[Any] = []
        for size in BALLAST_BYTES:
            while True:
                try:
                    ballast.append(allocate(size))
                except OutOfMemory:
                    break
        return ballast

    def _onnx_allocator(self) -> Callable[[int], Any]:
        from engine.backends.onnx.device import buffers

        held = buffers(self._provider(), 1)
        seed = np.zeros((1, 1, 1, 64), dtype=np.float32)
        return lambda size: held.grow(seed, (1, 1, size // 256, 64))

    def _mxnet_allocator(self) -> Callable[[int], Any]:
        from common.mxnet_compat import mx
        from engine.backends.mxnet.kv_cache import out_of_memory

        def allocate(size: int) -> Any:
            with out_of_memory(mx.gpu(0), f"{size} bytes"):
                array = mx.nd.zeros((size // 4,), ctx=mx.gpu(0))
                array.wait_to_read()
                return array

        return allocate


def start(backend: str, device: str) -> Started:
    checked = Checked(backend, device)
    names = ("load", "unload", "compare", "rows", "turns", "exhaust")
    commands = {name: getattr(checked, name) for name in names}
    return {}, {**commands, "generate": generation(checked.generate)}
