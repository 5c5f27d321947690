"""The Open Inference Protocol for a model of tensors: converts `handlers.v2.Tensor` and arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import InvalidRequest
from handlers import v2
from handlers.tensors.codec import Array, TensorSpec, from_values, listed, to_json


@dataclass(frozen=True)
class Metadata:
    name: str
    platform: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    version: str = "1"
    # Outputs that are no tensors -> their types.
    unserved: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer to `GET /v2/models/{name}`."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": self.platform,
            "inputs": [_described(spec) for spec in self.inputs],
            "outputs": [_described(spec) for spec in self.outputs],
        }


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.v2_shape}


def parse(
    value: Any, binary: bytes, metadata: Metadata
) -> tuple[v2.InferRequest, dict[str, Array]]:
    """Check a request; returns it and its inputs as arrays by name. Raises `InvalidRequest`."""
    specs = {spec.name: spec for spec in metadata.inputs}
    inputs = {name: str(spec) for name, spec in specs.items()}
    outputs = [spec.name for spec in metadata.outputs]
    request = v2.parse(value, binary, inputs, outputs, metadata.unserved)
    return request, {tensor.name: _array(tensor, specs[tensor.name]) for tensor in request.inputs}


def raw_request(data: bytes, metadata: Metadata) -> tuple[dict[str, Any], bytes]:
    """Convert a raw request; the number of bytes gives the shape. Raises `InvalidRequest`."""
    if len(metadata.inputs) == 1:
        spec = metadata.inputs[0]
        fixed = math.prod(size for size in spec.v2_shape if size >= 0)
        if spec.datatype == "BYTES":
            free, fits = 1, fixed == 1
        else:
            free, rest = divmod(len(data), max(fixed * spec.dtype.itemsize, 1))
            fits = spec.v2_shape.count(-1) <= 1 and not rest
        if fits:
            shape = [size if size >= 0 else free for size in spec.v2_shape]
            return v2.raw_request(spec.name, spec.datatype, shape, data)
    raise InvalidRequest(
        f"{len(data)} bytes without JSON must be one text, or one tensor with at most one"
        f" dimension of any size; the model takes {listed(metadata.inputs)}"
    )


def _array(tensor: v2.Tensor, spec: TensorSpec) -> Array:
    shape = list(tensor.shape)
    spec.check_shape(shape)
    if isinstance(tensor.data, bytes):
        return _from_bytes(tensor.data, shape, spec)
    if not isinstance(tensor.data, list):
        raise InvalidRequest(f"data of {spec.name} must be a list, flat or nested")
    array = from_values(tensor.data, spec)
    if array.ndim != 1 and list(array.shape) != shape:
        raise InvalidRequest(f"data of {spec.name} is {list(array.shape)}, but shape is {shape}")
    return _reshaped(array, shape, spec)


def _reshaped(array: Array, shape: list[int], spec: TensorSpec) -> Array:
    if array.size != math.prod(shape):
        raise InvalidRequest(
            f"{spec.name} has {array.size} values, but shape {shape} needs {math.prod(shape)}"
        )
    try:
        return array.reshape(shape)
    except ValueError as error:  # of an array without values, whose other sizes may be any
        raise InvalidRequest(
            f"{spec.name} has shape {shape}, a shape that no array has: {error}"
        ) from None


def _from_bytes(data: bytes, shape: list[int], spec: TensorSpec) -> Array:
    if spec.datatype == "BYTES":
        return _reshaped(np.array(v2.unpack_texts(data, spec.name), dtype=object), shape, spec)
    size = math.prod(shape) * spec.dtype.itemsize
    if len(data) != size:
        raise InvalidRequest(
            f"{spec.name} has {len(data)} bytes, but {spec.datatype} {shape} has {size}"
        )
    if spec.datatype == "BOOL" and data.strip(b"\0\1"):
        raise InvalidRequest(f"{spec.name} holds bytes other than 0 and 1, must be {spec}")
    return _reshaped(np.frombuffer(data, spec.dtype), shape, spec)


def answer(
    request: v2.InferRequest, outputs: Mapping[str, Array], metadata: Metadata
) -> tuple[bytes, str]:
    """Encode the outputs as the response's body and content type."""
    datatypes = {spec.name: spec.datatype for spec in metadata.outputs}
    tensors = []
    for name, as_bytes in request.outputs.items():
        array = outputs[name]
        data = _to_bytes(array) if as_bytes else array.ravel()
        tensors.append(v2.Tensor(name, datatypes[name], array.shape, data))
    return v2.answer(metadata.name, metadata.version, request, tensors, to_json)


def _to_bytes(array: Array) -> bytes:
    if array.dtype != object:
        return array.tobytes()
    return v2.pack_texts([str(text) for text in array.ravel()])
