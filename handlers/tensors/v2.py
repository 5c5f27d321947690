"""Requests and answers of the Open Inference Protocol (V2), in JSON and with binary data.

{"id", "inputs": [{"name", "shape", "datatype", "data"}], "outputs": [{"name"}]}
    -> {"model_name", "model_version", "id", "outputs": [{"name", "shape", "datatype", "data"}]}

https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import InvalidRequest
from common.media_types import JSON
from handlers.tensors.codec import Array, TensorSpec, from_values, listed, to_json
from handlers.v2_binary import joined, pack_texts, unpack_texts

FIELDS = ("id", "parameters", "inputs", "outputs")
INPUT_FIELDS = ("name", "shape", "datatype", "parameters", "data")
OUTPUT_FIELDS = ("name", "parameters")


@dataclass(frozen=True)
class InferRequest:
    """`outputs` maps the names asked for, in order, to whether they are sent as bytes."""

    inputs: dict[str, Array]
    outputs: dict[str, bool]
    id: str | None = None


@dataclass(frozen=True)
class Metadata:
    name: str
    platform: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    version: str = "1"
    unserved: Mapping[str, str] = field(default_factory=dict)  # outputs that are no tensors: why

    def to_dict(self) -> dict[str, Any]:
        """As `GET /v2/models/{name}` answers."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": self.platform,
            "inputs": [_described(spec) for spec in self.inputs],
            "outputs": [_described(spec) for spec in self.outputs],
        }


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.v2_shape}


def is_request(value: Any) -> bool:
    """Whether a JSON body is one of this protocol."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("inputs"), list)
        and all(isinstance(i, dict) and "name" in i for i in value["inputs"])
    )


# Requests


def parse(value: Any, binary: bytes, metadata: Metadata) -> InferRequest:
    """Raises `InvalidRequest` that names the field and says what is right."""
    if not is_request(value):
        raise InvalidRequest('the body must be {"inputs": [{"name", "shape", "datatype", "data"}]}')
    _check_fields(value, FIELDS, "")
    request_id = value.get("id")
    if not isinstance(request_id, str | None):
        raise InvalidRequest("id must be a string")
    specs = {spec.name: spec for spec in metadata.inputs}
    inputs: dict[str, Array] = {}
    at = 0
    for given in value["inputs"]:
        spec = _spec_of(given, specs, inputs)
        size = _parameters(given, f"inputs.{spec.name}").get("binary_data_size")
        if size is None:
            array = _from_data(given, spec)
        else:
            if type(size) is not int or not 0 <= size <= len(binary) - at:
                raise InvalidRequest(
                    f"binary_data_size of {spec.name} is {size!r:.50}, but {len(binary) - at}"
                    " bytes are left"
                )
            array = _from_bytes(binary[at : at + size], _shape(given, spec), spec)
            at += size
        inputs[spec.name] = array
    if at < len(binary):
        raise InvalidRequest(f"{len(binary) - at} bytes follow the last binary tensor")
    missing = [spec for spec in metadata.inputs if spec.name not in inputs]
    if missing:
        raise InvalidRequest(f"missing: {listed(missing)}")
    return InferRequest(inputs, _outputs(value, metadata), request_id)


def _check_fields(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in value:
        if name not in known:
            raise InvalidRequest(f"{where}{name} is not known; known are {', '.join(known)}")


def _parameters(value: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Those that nobody here knows are left alone: they are hints for other servers."""
    parameters = value.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}: parameters must be a JSON object")
    for name in ("shared_memory_region", "classification"):
        if name in parameters:
            raise InvalidRequest(f"{where}: {name} is not supported")
    return parameters


def _spec_of(given: Any, specs: Mapping[str, TensorSpec], seen: Mapping[str, Any]) -> TensorSpec:
    name = given["name"]
    if not isinstance(name, str) or name not in specs:
        raise InvalidRequest(
            f"input {name!r:.100} is not known; known are {listed(list(specs.values()))}"
        )
    if name in seen:
        raise InvalidRequest(f"input {name} is there twice")
    _check_fields(given, INPUT_FIELDS, f"inputs.{name}.")
    spec = specs[name]
    if given.get("datatype") != spec.datatype:
        raise InvalidRequest(
            f"{name} has datatype {given.get('datatype')!r:.50}, must be {spec.datatype}"
        )
    return spec


def _shape(given: Mapping[str, Any], spec: TensorSpec) -> list[int]:
    shape = given.get("shape")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise InvalidRequest(f"shape of {spec.name} must be a list of sizes, {spec}")
    spec.check_shape(shape)
    return shape


def _from_data(given: Mapping[str, Any], spec: TensorSpec) -> Array:
    shape = _shape(given, spec)
    if not isinstance(given.get("data"), list):
        raise InvalidRequest(f"data of {spec.name} must be a list, flat or nested")
    array = from_values(given["data"], spec)
    if array.ndim != 1 and list(array.shape) != shape:
        raise InvalidRequest(f"data of {spec.name} is {list(array.shape)}, but shape is {shape}")
    return _reshaped(array, shape, spec)


def _reshaped(array: Array, shape: list[int], spec: TensorSpec) -> Array:
    if array.size != math.prod(shape):
        raise InvalidRequest(
            f"{spec.name} has {array.size} values, but shape {shape} needs {math.prod(shape)}"
        )
    return array.reshape(shape)


def _from_bytes(data: bytes, shape: list[int], spec: TensorSpec) -> Array:
    if spec.datatype == "BYTES":
        return _reshaped(np.array(unpack_texts(data, spec.name), dtype=object), shape, spec)
    size = math.prod(shape) * spec.dtype.itemsize
    if len(data) != size:
        raise InvalidRequest(
            f"{spec.name} has {len(data)} bytes, but {spec.datatype} {shape} has {size}"
        )
    if spec.datatype == "BOOL" and data.strip(b"\0\1"):
        raise InvalidRequest(f"{spec.name} holds bytes other than 0 and 1, must be {spec}")
    return np.frombuffer(data, spec.dtype).reshape(shape)


def _outputs(value: Mapping[str, Any], metadata: Metadata) -> dict[str, bool]:
    binary = bool(_parameters(value, "the request").get("binary_data_output"))
    known = [spec.name for spec in metadata.outputs]
    asked = value.get("outputs") or [{"name": name} for name in known]
    if not isinstance(asked, list):
        raise InvalidRequest('outputs must be a list of {"name": ...}')
    outputs: dict[str, bool] = {}
    for output in asked:
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise InvalidRequest('outputs must be a list of {"name": ...}')
        name = output["name"]
        if name in metadata.unserved:
            raise InvalidRequest(f"output {name} is no tensor but {metadata.unserved[name]}")
        if name not in known:
            raise InvalidRequest(f"output {name[:100]} is not known; known are {', '.join(known)}")
        _check_fields(output, OUTPUT_FIELDS, f"outputs.{name}.")
        outputs[name] = bool(_parameters(output, f"outputs.{name}").get("binary_data", binary))
    return outputs


# Answers


def answer(
    request: InferRequest, outputs: Mapping[str, Array], metadata: Metadata
) -> tuple[bytes, str]:
    """The body and its content type."""
    described, pieces = [], []
    datatypes = {spec.name: spec.datatype for spec in metadata.outputs}
    for name, as_bytes in request.outputs.items():
        array = outputs[name]
        entry: dict[str, Any] = {
            "name": name,
            "datatype": datatypes[name],
            "shape": list(array.shape),
        }
        if as_bytes:
            piece = _to_bytes(array)
            entry["parameters"] = {"binary_data_size": len(piece)}
            pieces.append(piece)
        else:
            entry["data"] = array.ravel()
        described.append(entry)
    body: dict[str, Any] = {"model_name": metadata.name, "model_version": metadata.version}
    if request.id is not None:
        body["id"] = request.id
    header = to_json({**body, "outputs": described})
    if not pieces:
        return header, JSON
    return joined(header, pieces)


def _to_bytes(array: Array) -> bytes:
    if array.dtype != object:
        return array.tobytes()
    return pack_texts([str(text) for text in array.ravel()])
