"""Writes models' files: `.params`, `.safetensors` and LoRA adapters."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from command.documents import write_json
from common.model_files import ADAPTER
from engine.artifacts import read_params
from engine.artifacts.adapter import PRODUCTS, WEIGHT_FILES

if TYPE_CHECKING:
    from engine.native.adapter import LowRank

CODES = {dtype: code for code, dtype in read_params.CODES.items()}


def write_params(
    path: Path,
    weights: Iterable[tuple[str, NDArray[Any]]],
    dtype: str | None = None,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Write MXNet's format as `mx.nd.save` does, but one array at a time and without MXNet.

    `engine.artifacts.read_params` describes the format. `dtype` is that of all arrays in the file,
    by default each array's own. `progress` is called with the bytes of each array, once written.
    """
    names = []
    with path.open("wb") as file:
        file.write(struct.pack("<QQQ", 0x112, 0, 0))
        for name, w in weights:
            names.append(name.encode())
            file.write(struct.pack("<IiI", 0xF993FAC9, 0, w.ndim))
            file.write(struct.pack(f"<{w.ndim}q", *w.shape))
            file.write(struct.pack("<iii", 1, 0, CODES[dtype or w.dtype.name]))
            data = np.ascontiguousarray(w, dtype=dtype).data
            file.write(data)
            progress(data.nbytes)
        file.write(struct.pack("<Q", len(names)))
        for encoded in names:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.seek(16)
        file.write(struct.pack("<Q", len(names)))


def write_safetensors(
    path: Path,
    arrays: Iterable[tuple[str, NDArray[Any]]],
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Write a .safetensors file of arrays of any strides; non-contiguous arrays are copied.

    `progress` is called with each array's number of bytes once it is ready to be written.
    """
    tensors, alive = {}, []
    for name, array in arrays:
        dtype = array.dtype.name.replace("void16", "bfloat16")  # numpy has no bfloat16
        alive.append(data := np.ascontiguousarray(array))  # memory behind data_ptr until the write
        tensors[name] = TensorSpec(
            dtype=dtype, shape=list(array.shape), data_ptr=data.ctypes.data, data_len=data.nbytes
        )
        progress(data.nbytes)
    serialize_file(tensors, str(path), {"format": "pt"})


def write_adapter(
    folder: Path, base: str, matrices: Mapping[tuple[int, str], LowRank], rank: int
) -> None:
    """Write an adapter as PEFT's `save_pretrained` does.

    `matrices` by (layer, product); `base` is the name of its base model.
    """
    theirs = {ours: name for name, ours in PRODUCTS.items()}
    tensors = []
    for (layer, product), matrix in matrices.items():
        at = f"base_model.model.transformer.h.{layer}.{theirs[product]}"
        tensors.append((f"{at}.lora_A.weight", np.ascontiguousarray(matrix.down)))
        tensors.append((f"{at}.lora_B.weight", np.ascontiguousarray(matrix.up)))
    write_safetensors(folder / WEIGHT_FILES[0], tensors)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({theirs[p].partition(".")[2] for _, p in matrices}),
        "fan_in_fan_out": True,
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / ADAPTER, config, indent=2)
