"""The low-rank matrices of an adapter as the library reads them, packed into one mapped file.

LoRA: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from common.memory import MIB
from engine.artifacts.adapter import BASE_NAMES, Adapter
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends.page_cache import Span
from engine.native import library
from engine.native.prepared import PreparedFile, Stored, file_name, open_prepared, put, write_file
from engine.prepared import manifest as manifests
from engine.prepared.manifest import Run, directly, to_manifest
from engine.sandbox import Limits

Module = tuple[int, str]  # a layer, and one of `library.PRODUCTS`
BUILD_MIB, BUILD_CPU_S = 512, 60


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a product with x (T, k): `up (down x + bias)`."""

    down: NDArray[np.float32]  # (rank, k)
    up: NDArray[np.float32]  # (n, rank)
    bias: NDArray[np.float32] | None = None  # (rank,)


class NativeAdapter:
    """The matrices of all layers: fp16 for a model in int8, fp32 for one in fp32."""

    def __init__(
        self,
        config: GPT2Config,
        ranks: Mapping[Module, int],
        addresses: Mapping[str, int],
        num_bytes: int,
        mapped: Sequence[Span] = (),
        close: Callable[[], object] = lambda: None,
    ) -> None:
        """`addresses` say where tensors such as `3.qkv.down` lie; valid until `close`."""
        self._layers = (library.AdapterLayer * config.num_layers)()
        self.address = ctypes.addressof(self._layers)
        self.num_bytes, self.mapped, self._close = num_bytes, mapped, close
        for (layer, product), rank in ranks.items():
            entry = getattr(self._layers[layer], product)
            entry.rank = rank
            for part in ("down", "up", "bias"):
                setattr(entry, part, addresses.get(f"{layer}.{product}.{part}"))

    @classmethod
    def of(
        cls, config: GPT2Config, precision: str, matrices: Mapping[Module, LowRank]
    ) -> NativeAdapter:
        """One in memory. Raises `ArtifactError` for numbers that fp16 does not hold."""
        arrays = _packed_arrays(matrices, precision)
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        ranks = {module: len(matrix.down) for module, matrix in matrices.items()}
        size = sum(array.nbytes for array in arrays.values())
        return cls(config, ranks, addresses, size, close=arrays.clear)  # keeps them until then

    def close(self) -> None:
        """No pass may use it any more."""
        self.mapped = ()
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
    changes_biases = any(entry.name.endswith(".bias") for entry in entries)
    content = adapter.content + (base.content if changes_biases else "")

    def build_at(file: Path) -> Any:
        size = sum(tensor.nbytes for tensor in adapter.index.values())
        return run(
            build,
            *(str(adapter.path), to_manifest(adapter), str(base.path), to_manifest(base)),
            str(file),
            precision,
            content,
            what=adapter.path.name,
            limits=Limits(
                memory_mib=BUILD_MIB + 16 * size // MIB,
                cpu_s=BUILD_CPU_S,
                write_mib=64 + 4 * size // MIB,
                niceness=manifests.NICENESS,
            ),
        )

    file = open_prepared(
        adapter.path,
        file_name(["adapter", content, precision, sorted(adapter.scales.items())]),
        cache_dir,
        lambda path: PreparedFile(path, entries, content),
        build_at,
    )
    ranks = {_module(entry.name): entry.shape[1] for entry in entries if entry.name.endswith(".up")}
    return NativeAdapter(
        base.config,
        ranks,
        file.addresses,
        sum(entry.num_bytes for entry in entries),
        [file.span],
        file.close,
    )


def num_bytes(adapter: Adapter, precision: str) -> int:
    """Bytes of an adapter's matrices once they are packed."""
    return sum(entry.num_bytes for entry in layout(adapter, precision))


def layout(adapter: Adapter, precision: str) -> Iterator[Stored]:
    """The tensors of its prepared file, in order; matrices in groups of columns, see product.h."""
    dtype, line = "F16" if precision == "int8" else "F32", library.LINE
    for module in sorted(adapter.scales):
        rank, inputs = adapter.index[f"{module}.down"].shape
        outputs = adapter.index[f"{module}.up"].shape[0]
        biased = adapter.changes_bias(module)
        rank += biased  # see _low_rank
        yield Stored(f"{module}.down", (-(-rank // line), inputs, line), dtype)
        yield Stored(f"{module}.up", (-(-outputs // line), rank, line), dtype)
        if biased:
            yield Stored(f"{module}.bias", (-(-rank // line) * line,), "F32")


def _module(name: str) -> Module:
    layer, product, _ = name.split(".")
    return int(layer), product


# In the sandbox


def build(
    path: str,
    manifest: dict[str, Any],
    base_path: str,
    base_manifest: dict[str, Any],
    file: str,
    precision: str,
    content: str,
) -> str | None:
    """Write an adapter's prepared file; returns what is wrong with its folder, if anything."""
    adapter = manifests.adapter_from_manifest(Path(path), manifest)
    base = manifests.from_manifest(Path(base_path), base_manifest)
    entries = list(layout(adapter, precision))
    arrays = _packed_arrays(low_ranks(adapter, base), precision)

    def fill(data: NDArray[np.uint8]) -> None:
        at = 0
        for entry in entries:
            data[at : at + entry.num_bytes] = arrays[entry.name].reshape(-1).view(np.uint8)
            at += entry.num_bytes

    return put(Path(file), lambda target: write_file(target, entries, content, fill))


def low_ranks(adapter: Adapter, base: Artifact) -> dict[Module, LowRank]:
    """An adapter's matrices by layer and product, its scales in `up`."""
    matrices = {}
    for module, scale in adapter.scales.items():
        layer, product = module.split(".")
        matrices[int(layer), product] = _low_rank(adapter, base, module, scale)
    return matrices


def _low_rank(adapter: Adapter, base: Artifact, module: str, scale: float) -> LowRank:
    def numbers(name: str, weights: Mapping[str, NDArray[Any]] = adapter.weights) -> Any:
        return np.asarray(weights[name], np.float32) if name in weights else None

    layer, product = module.split(".")
    down, up = numbers(f"{module}.down"), scale * numbers(f"{module}.up")
    if not adapter.changes_bias(module):
        return LowRank(down, up)
    more = np.zeros(len(up), np.float32)  # beside the product: what was trained of biases
    if (up_bias := numbers(f"{module}.up_bias")) is not None:
        more += scale * up_bias
    if (bias := numbers(f"{module}.bias")) is not None:
        more += bias - numbers(f"{BASE_NAMES[product].format(layer)}.bias", base.weights)
    # One more rank, whose number is always 1.
    ones = np.array([0.0] * len(down) + [1.0], np.float32)
    down = np.concatenate([down, np.zeros((1, down.shape[1]), np.float32)])
    return LowRank(down, np.concatenate([up, more[:, None]], axis=1), ones)


def _packed_arrays(matrices: Mapping[Module, LowRank], precision: str) -> dict[str, NDArray[Any]]:
    """The parts of adapters' products as the library reads them, such as `3.qkv.down`."""
    arrays: dict[str, NDArray[Any]] = {}
    dtype = np.float16 if precision == "int8" else np.float32
    for (layer, product), matrix in matrices.items():
        arrays[f"{layer}.{product}.down"] = _grouped(matrix.down, dtype)
        arrays[f"{layer}.{product}.up"] = _grouped(matrix.up, dtype)
        if matrix.bias is not None:
            padding = (0, -len(matrix.bias) % library.LINE)
            arrays[f"{layer}.{product}.bias"] = np.pad(matrix.bias, padding)
    return arrays


def _grouped(matrix: NDArray[np.float32], dtype: Any) -> NDArray[Any]:
    """A matrix (n, k) in groups of `library.LINE` columns: (groups, k, LINE)."""
    n, k = matrix.shape
    padded = np.zeros((-(-n // library.LINE) * library.LINE, k), dtype)
    with np.errstate(over="ignore"):
        padded[:n] = matrix
    if not np.isfinite(padded).all():
        raise ArtifactError("the adapter holds numbers that are too large for fp16")
    return np.ascontiguousarray(padded.reshape(-1, library.LINE, k).transpose(0, 2, 1))
