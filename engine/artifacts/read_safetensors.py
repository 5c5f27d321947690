"""Reads `.safetensors` files with numpy alone, the arrays mapped from the file.

The safetensors package copies each tensor and has no bfloat16 for numpy. Format:
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from engine.artifacts.files import map_file, parse_json
from engine.artifacts.tensor_index import Index, Tensor, check_count, check_name, contiguous

MAX_HEADER_BYTES = 16 << 20  # the format allows 100 MB; a tensor takes 100 bytes of it
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def index_safetensors(path: Path) -> Index:
    """Index a file's tensors by name. Raises `ArtifactError`."""
    return read_safetensors(path)[0]


def read_safetensors(path: Path) -> tuple[Index, dict[str, Any], int]:
    """Return a file's index, its metadata, and the offset of the data. Raises `ArtifactError`."""
    data, file = map_file(path), path.name
    if len(data) < 8:
        raise ArtifactError(f"{file} is not a safetensors file: it is too short")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ArtifactError(f"{file} is not a safetensors file, or is cut short")
    try:
        header = parse_json(data[8 : 8 + length].tobytes(), "the header")
    except ArtifactError as error:
        raise ArtifactError(
            f"{file} is not a safetensors file, no JSON header: {error.message}"
        ) from None
    metadata = header.pop("__metadata__", None)
    check_count(len(header), file)
    begin = 8 + length
    index = {
        check_name(name, file): _tensor(file, name, entry, begin, len(data))
        for name, entry in header.items()
    }
    return index, metadata if isinstance(metadata, dict) else {}, begin


def _tensor(file: str, name: str, entry: Any, body: int, file_bytes: int) -> Tensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
            raise ValueError("must be natural numbers")
    except (TypeError, KeyError, ValueError):
        raise ArtifactError(f"{file}: the header's entry of {name} is damaged") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ArtifactError(f"{file}: {name} is of type {dtype}, must be one of {known}")
    tensor = contiguous(file, body + begin, DTYPES[dtype], shape).check(name, file_bytes)
    if end - begin != tensor.nbytes:
        raise ArtifactError(f"{file}: {name} does not have the length of its shape {list(shape)}")
    return tensor
