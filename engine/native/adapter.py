"""The low-rank matrices of an adapter as the library reads them, packed into one mapped file.

LoRA: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from common.memory import MIB
from engine.artifacts.adapter import BASE_NAMES, Adapter
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends.page_cache import Span, advise_cold, read_in
from engine.native import library, rotation
from engine.native.prepared import PreparedFile, Stored, open_prepared, write_arrays
from engine.prepared import manifest as manifests
from engine.prepared.manifest import Run, directly, to_manifest
from engine.sandbox import Limits

Module = tuple[int, str]  # a layer, and one of `library.PRODUCTS`
Shape = tuple[int, ...]
BUILD_MIB, BUILD_CPU_S = 512, 60


@dataclass(frozen=True)
class LowRank:
    """The term `up (down x + down_bias) + bias` that an adapter adds to a product with x (T, k)."""

    down: NDArray[np.float32]  # (rank, k)
    up: NDArray[np.float32]  # (n, rank)
    down_bias: NDArray[np.float32] | None = None  # (rank,)
    bias: NDArray[np.float32] | None = None  # (n,)


class NativeAdapter:
    """What a fine-tune adds to its base, see `Adapter` in pass.h.

    Matrices of low rank are fp16 for a model in int8, fp32 for a model in fp32.
    """

    def __init__(
        self,
        config: GPT2Config,
        tensors: Mapping[str, tuple[int, Shape]],
        num_bytes: int,
        close: Callable[[], object],
        file: PreparedFile | None = None,
        bits: Mapping[str, int] | None = None,
        more: int = 0,
    ) -> None:
        """`tensors`: addresses, valid until `close`, and packed shapes.

        Their names are those of the structures' fields, such as `3.qkv.down` and `head.rest`.
        `bits`: of the numbers of a rest, by `3.qkv` and `head`
        `more`: tokens that the base does not have
        """
        self._layers = (library.AdapterLayer * config.num_layers)()
        self._adapter, self.more = library.Adapter(layers=self._layers, more=more), more
        self.address = ctypes.addressof(self._adapter)
        self.num_bytes, self._file, self._close = num_bytes, file, close
        self._lock, self._readers, self._closed = threading.Lock(), 0, False
        for name, (address, shape) in tensors.items():
            change, _, part = name.rpartition(".")
            layer, _, field = change.rpartition(".")
            entry = self._layers[int(layer)] if layer else self._adapter
            entry = entry if change == "adapter" else getattr(entry, field)
            setattr(entry, part, address)
            if part == "up":
                entry.rank = shape[1]
            elif part == "rest":
                entry.bits = (bits or {})[change]

    @classmethod
    def of(
        cls, config: GPT2Config, precision: str, matrices: Mapping[Module, LowRank]
    ) -> NativeAdapter:
        """Pack matrices in memory. Raises `ArtifactError` for NaN, infinity and beyond fp16."""
        modules = {f"{layer}.{product}": m for (layer, product), m in matrices.items()}
        arrays = _packed_arrays(modules, precision)
        tensors = {name: (array.ctypes.data, array.shape) for name, array in arrays.items()}
        size = sum(array.nbytes for array in arrays.values())
        return cls(config, tensors, size, arrays.clear)  # `clear` references the arrays

    def is_lost(self) -> bool:
        return self._file is not None and self._file.is_lost()

    def read_in(self) -> None:
        """Read the file into memory; does nothing after `close`, which waits for no disk."""
        self._with_file(read_in)

    def advise_cold(self) -> None:
        """Let the kernel evict the file before others; does nothing after `close`."""
        self._with_file(advise_cold)

    def _with_file(self, work: Callable[[list[Span]], object]) -> None:
        with self._lock:
            if self._closed or self._file is None:
                return
            self._readers += 1
        try:
            work([self._file.span])
        finally:
            self._end(readers=1)

    def close(self) -> None:
        """Release the matrices, which no pass may use any more, once no thread reads them in."""
        self._end(closed=True)

    def _end(self, readers: int = 0, closed: bool = False) -> None:
        with self._lock:
            self._readers -= readers
            self._closed |= closed
            over = self._closed and not self._readers
        if over:
            self._close()


def load_adapter(
    adapter: Adapter,
    base: Artifact,
    precision: str,
    cache_dir: Path | None = None,
    run: Run = directly,
) -> NativeAdapter:
    """Map an adapter's prepared file, which `run` builds if needed. Raises as `prepared`."""
    adapter.check_fits(base.config)
    entries = list(layout(adapter, precision))
    # A bias changes by what the base's is, and an adapter of a base in int8 is in its basis.
    is_of_base = precision == "int8" or any(entry.name.endswith(".bias") for entry in entries)
    content = adapter.content + (base.content if is_of_base else "")
    size = sum(tensor.nbytes for tensor in adapter.index.values())
    limits = Limits(
        memory_mib=BUILD_MIB + 16 * size // MIB,
        cpu_s=BUILD_CPU_S,
        niceness=manifests.NICENESS,
    )
    sources = [(str(part.path), to_manifest(part)) for part in (adapter, base)]
    file = open_prepared(
        adapter.path,
        ["adapter", content, precision, sorted(adapter.scales.items())],
        lambda _: entries,
        entries,
        content,
        cache_dir,
        partial(run, build, sources, precision, content, what="the adapter", limits=limits),
    )
    tensors = {entry.name: (file.addresses[entry.name], entry.shape) for entry in entries}
    size = sum(entry.num_bytes for entry in entries)
    return NativeAdapter(base.config, tensors, size, file.close, file)


def num_bytes(adapter: Adapter, precision: str) -> int:
    """Return the bytes of an adapter's packed matrices."""
    return sum(entry.num_bytes for entry in layout(adapter, precision))


def layout(adapter: Adapter, precision: str) -> Iterator[Stored]:
    """Yield the tensors of an adapter's prepared file, in order; product.h has their layout."""
    dtype, line = "F16" if precision == "int8" else "F32", library.LINE
    for module in sorted(adapter.scales):
        rank, inputs = adapter.index[f"{module}.down"].shape
        outputs = adapter.index[f"{module}.up"].shape[0]
        yield Stored(f"{module}.down", (-(-rank // line), inputs, line), dtype)
        yield Stored(f"{module}.up", (-(-outputs // line), rank, line), dtype)
        if precision == "int8" and rotation.norm_before(*module.split(".")):
            yield Stored(f"{module}.down_bias", (-(-rank // line) * line,), "F32")
        if adapter.changes_bias(module):
            yield Stored(f"{module}.bias", (-(-outputs // line) * line,), "F32")


# In the sandbox


def build(
    sources: list[tuple[str, dict[str, Any]]], precision: str, content: str, file: int
) -> int:
    """Write an adapter's prepared file; returns its bytes.

    sources: path and manifest of the adapter, and of its base
    """
    (path, manifest), (base_path, base_manifest) = sources
    adapter = manifests.adapter_from_manifest(Path(path), manifest)
    base = manifests.from_manifest(Path(base_path), base_manifest)
    entries = list(layout(adapter, precision))
    with np.errstate(over="ignore", invalid="ignore"):  # `grouped` refuses the results
        matrices = {module: _low_rank(adapter, base, module) for module in adapter.scales}
        if precision == "int8":
            layers = {module.split(".")[0] for module in matrices}
            factors = {layer: rotation.head_factors(base.weights, layer) for layer in layers}
            matrices = {
                module: _rotated(matrix, base, module, factors[module.split(".")[0]])
                for module, matrix in matrices.items()
            }
    arrays = _packed_arrays(matrices, precision)
    return write_arrays(file, entries, {"source": content}, arrays)


def _low_rank(adapter: Adapter, base: Artifact, module: str) -> LowRank:
    """Return the matrices of a module such as `3.qkv`, `up` multiplied by its scale."""

    def numbers(name: str, weights: Mapping[str, NDArray[Any]] = adapter.weights) -> Any:
        return np.asarray(weights[name], np.float32) if name in weights else None

    layer, product = module.split(".")
    scale = adapter.scales[module]
    down = numbers(f"{module}.down")
    up = np.multiply(scale, numbers(f"{module}.up"), dtype=np.float32)
    if not adapter.changes_bias(module):
        return LowRank(down, up)
    more = np.zeros(len(up), np.float32)  # the trained change of the layer's bias
    if (up_bias := numbers(f"{module}.up_bias")) is not None:
        more += scale * up_bias
    if (bias := numbers(f"{module}.bias")) is not None:
        more += bias - numbers(f"{BASE_NAMES[product].format(layer)}.bias", base.weights)
    return LowRank(down, up, bias=more)


def _rotated(matrix: LowRank, base: Artifact, module: str, factors: rotation.Floats) -> LowRank:
    """Return a module's matrices for a base in int8, see `engine.native.rotation`."""
    layer, product = module.split(".")
    down, up, down_bias = rotation.floats(matrix.down), rotation.floats(matrix.up), None
    if (norm := rotation.norm_before(layer, product)) is not None:
        down_bias, parts = np.zeros(len(down), np.float32), ("gamma", "beta")
        rotation.fold_norm(down, down_bias, *(base.weights[f"{norm}.{part}"] for part in parts))
    bias = matrix.bias if matrix.bias is None else matrix.bias.reshape(-1, 1)
    for outputs in (up,) if bias is None else (up, bias):
        rotation.rotate_outputs(product, outputs, base.config, factors)
    if product != "ffn_out":  # adapters multiply what comes out of GELU before it is rotated
        down = rotation.rotate_inputs(product, down, base.config, factors)
    return LowRank(down, up, down_bias, None if bias is None else bias[:, 0])


def _packed_arrays(matrices: Mapping[str, LowRank], precision: str) -> dict[str, NDArray[Any]]:
    """Pack modules' matrices as the library reads them, by names such as `3.qkv.down`."""
    arrays: dict[str, NDArray[Any]] = {}
    dtype = np.float16 if precision == "int8" else np.float32
    for module, matrix in matrices.items():
        arrays[f"{module}.down"] = grouped(f"{module}.down", matrix.down, dtype)
        arrays[f"{module}.up"] = grouped(f"{module}.up times its scale", matrix.up, dtype)
        for part, bias in (("down_bias", matrix.down_bias), ("bias", matrix.bias)):
            if bias is not None:
                _check_finite(f"{module}.{part}", bias)
                arrays[f"{module}.{part}"] = padded(bias)
    return arrays


def _check_finite(name: str, numbers: NDArray[np.float32]) -> None:
    if not np.isfinite(numbers).all():
        raise ArtifactError(f"the adapter's weights are not finite: {name} holds NaN or infinity")


def grouped(name: str, matrix: NDArray[np.float32], dtype: Any) -> NDArray[Any]:
    """Pack a matrix (n, k) as (groups, k, LINE), with `library.LINE` of the n in each group.

    Raises `ArtifactError` for NaN, infinity, and what is too large for fp16.
    """
    _check_finite(name, matrix)
    n, k = matrix.shape
    padded = np.zeros((-(-n // library.LINE) * library.LINE, k), dtype)
    padded[:n] = fp16(name, matrix) if dtype == np.float16 else matrix
    return np.ascontiguousarray(padded.reshape(-1, library.LINE, k).transpose(0, 2, 1))


def padded(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector with zeros behind it up to whole lines, as the library reads it."""
    return np.pad(vector, (0, -len(vector) % library.LINE))


def fp16(name: str, numbers: NDArray[np.float32]) -> NDArray[np.float16]:
    """Return numbers in fp16. Raises `ArtifactError` if one of them is too large."""
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ArtifactError(f"{name} of the adapter holds numbers that are too large for fp16")
    return halves
