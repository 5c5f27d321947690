"""Memory on a device for K/V caches and weights, managed by onnxruntime alone.

Memory is allocated as the output of a session, bound by its address, and copied by graphs of one
kind of operator. No API of CUDA is used, so the same code runs on the CPU provider.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from common import onnx_session
from common.errors import InvalidRequest, OutOfMemory
from engine.backends import nvidia

SAME_AS_REQUESTED = 1  # for `arena_extend_strategy`; the default rounds up to a power of two
# A free block of the arena is split if more than this would be unused. Larger: more memory.
MAX_DEAD_BYTES = 1 << 20

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Provider:
    """A device of an execution provider."""

    name: str
    device: str  # as IOBinding calls it
    memory: str  # as OrtMemoryInfo calls it
    arena: str  # as `memory.enable_memory_arena_shrinkage` calls it
    limit_bytes: int = 0  # of a session's memory beside its weights; 0: no limit

    @property
    def options(self) -> dict[str, str]:
        """The options of the execution provider, for memory outside of the shared arena."""
        if self.device == "cpu":
            return {}
        return {"device_id": "0", "arena_extend_strategy": "kSameAsRequested"}


CUDA = Provider("CUDAExecutionProvider", "cuda", "Cuda", "gpu:0")
CPU = Provider("CPUExecutionProvider", "cpu", "Cpu", "cpu:0")  # to test the code for GPUs


_preparing = threading.Lock()


@functools.cache
def _prepare(provider: Provider) -> None:
    """Register one arena for all sessions, which share its unused memory.

    Raises `InvalidRequest` with what to install where the provider cannot work.
    """
    version = onnxruntime.__version__
    if provider.name not in onnxruntime.get_available_providers():
        raise InvalidRequest(
            f"the onnxruntime {version} that is installed cannot use a GPU: pip uninstall"
            f" onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]=={version}'"
        )
    if provider.device != "cpu":
        nvidia.memory_bytes()
        output = io.StringIO()
        with contextlib.redirect_stdout(output):  # it prints the libraries that are missing
            onnxruntime.preload_dlls()  # from NVIDIA's wheels
        logger.info("CUDA's libraries: %s", output.getvalue() or "found")
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    info = onnxruntime.OrtMemoryInfo(provider.memory, kind, 0, onnxruntime.OrtMemType.DEFAULT)
    settings = {
        "max_mem": provider.limit_bytes,
        "arena_extend_strategy": SAME_AS_REQUESTED,
        "max_dead_bytes_per_chunk": MAX_DEAD_BYTES,
    }
    try:
        onnxruntime.create_and_register_allocator_v2(
            provider.name, info, provider.options, onnxruntime.OrtArenaCfg(settings)
        )
    except RuntimeError as error:  # the provider's library does not find CUDA's
        raise _unusable(provider) from error


def open_session(graph: bytes, provider: Provider, weights: Mapping[str, Any]) -> Any:
    """Open a graph. Raises `OutOfMemory`, `InvalidRequest`.

    `weights` are OrtValues for its external initializers; the CPU provider does not copy them, so
    the caller must keep them alive.
    """
    with _preparing:  # so that only one thread registers the arena
        _prepare(provider)
    options = onnx_session.session_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Weights are outside of the arena, so that their memory is freed when the session ends.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_external_initializers(list(weights), list(weights.values()))
    providers = [(provider.name, provider.options)]
    with onnx_session.out_of_memory("the model"):
        session = onnxruntime.InferenceSession(graph, options, providers=providers)
    if session.get_providers()[0] != provider.name:  # onnxruntime falls back to the CPU
        raise _unusable(provider)
    return session


def _unusable(provider: Provider) -> InvalidRequest:
    version, cuda = onnxruntime.__version__, getattr(onnxruntime, "cuda_version", "")
    return InvalidRequest(
        f"onnxruntime's {provider.name} does not start: it needs CUDA {cuda}, cuDNN 9 and a driver"
        f" for them; pip install 'onnxruntime-gpu[cuda,cudnn]=={version}' brings the first two"
    )


class Buffers:
    """Makes, grows and copies buffers on a device: arrays of 4-byte elements, zero where new.

    onnxruntime's CPU provider lacks some of this for fp16, so two fp16 are moved as one float, bit
    for bit.
    """

    def __init__(self, provider: Provider, count: int) -> None:
        self.provider, self.count = provider, count
        F, I64, info = TensorProto.FLOAT, TensorProto.INT64, helper.make_tensor_value_info
        dims = ["A", "B", "C", "D"]
        pad = helper.make_node("Pad", ["x", "pads"], ["y"])
        self._pad = self._open(
            [pad],
            [info("x", F, dims), info("pads", I64, [2 * len(dims)])],
            [info("y", F, [f"{d}2" for d in dims])],
        )
        pairs = [(f"x{i}", f"y{i}") for i in range(count)]
        self._copy = self._open(
            [helper.make_node("Identity", [x], [y]) for x, y in pairs],
            [info(x, F, [f"N{i}"]) for i, (x, _) in enumerate(pairs)],
            [info(y, F, [f"N{i}"]) for i, (_, y) in enumerate(pairs)],
        )

    def _open(self, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> Any:
        graph = helper.make_graph(nodes, "buffers", inputs, outputs)
        opset = helper.make_opsetid("", 17)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
        return open_session(model.SerializeToString(), self.provider, {})

    def grow(self, old: Any, shape: Sequence[int]) -> Any:
        """Return a buffer of `shape` that begins with `old` on all axes. Raises `OutOfMemory`."""
        now = old.shape if isinstance(old, np.ndarray) else old.shape()
        pads = np.array([*[0] * len(shape), *np.subtract(shape, now)], dtype=np.int64)
        return self.retry_after_trim(lambda: self._padded(old, pads))

    def retry_after_trim(self, call: Callable[[], T]) -> T:
        """Call `call`, and once more after `trim` if it raises `OutOfMemory`.

        Each free block of the arena may be too small; after `trim` the device can allocate one that
        is large enough.
        """
        try:
            return call()
        except OutOfMemory:
            self.trim()
            return call()

    def _padded(self, old: Any, pads: NDArray[np.int64], options: Any = None) -> Any:
        binding = self._pad.io_binding()
        if isinstance(old, np.ndarray):
            binding.bind_cpu_input("x", old)
        else:
            binding.bind_ortvalue_input("x", old)
        binding.bind_cpu_input("pads", pads)
        binding.bind_output("y", self.provider.device, 0)
        with onnx_session.out_of_memory("keys and values"):
            self._pad.run_with_iobinding(binding, options)
        binding.clear_binding_inputs()  # else the output's binding keeps the old buffer alive
        return binding.get_outputs()[0]

    def copy(self, sources: Sequence[int], targets: Sequence[int], count: int) -> None:
        """Copy `count` elements from each source address to its target; no two may overlap."""
        binding = self._copy.io_binding()
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            place = (self.provider.device, 0, np.float32, [count])
            binding.bind_input(f"x{i}", *place, source)
            binding.bind_output(f"y{i}", *place, target)
        with onnx_session.out_of_memory("keys and values"):
            self._copy.run_with_iobinding(binding)

    def trim(self) -> None:
        """Return the arena's unused memory to the device."""
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self.provider.arena)
        small = np.zeros((1, 1, 1, 1), dtype=np.float32)
        try:
            self._padded(small, np.zeros(8, dtype=np.int64), options)
        except (OutOfMemory, RuntimeError) as error:
            logger.warning("the device's memory stays with the arena: %s", error)


# Models with the same number of buffers share a session, which takes much memory on a GPU.
buffers = functools.cache(Buffers)
