"""Converts ModelInfer requests to bodies of the HTTP route, and its answers to messages.

Raw tensors become binary tensors, and `contents` become `data`. Outputs are requested in binary, as
Triton returns them; an output that a model sends as `data` all the same is returned as `contents`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from common.errors import InvalidRequest
from common.json_body import check_count
from serving.api.grpc.messages import message
from serving.api.v2.inference import HEADER_LENGTH
from serving.errors import BadRequest, WorkerFailed

# A parameter of Triton's client that has no effect here: its behavior is always on.
EMPTY_END = "triton_enable_empty_final_response"
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

# Names and values in the JSON of an answer: a value may take 70 times the bytes of its JSON.
MAX_VALUES = 1_000_000

ModelInferResponse = message("inference.ModelInferResponse")


def parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert gRPC's parameters to values for JSON."""
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in given.items()}
    return {name: getattr(given[name], kind) if kind else None for name, kind in chosen.items()}


def set_parameter(into: Mapping[str, Any], name: str, value: Any) -> None:
    """Set a gRPC parameter; ignore a value that gRPC has no type for, such as a list."""
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    if type(value) in kinds:
        setattr(into[name], kinds[type(value)], value)


def to_http(request: Any) -> tuple[bytes, dict[str, str]]:
    """Convert a `ModelInferRequest` to an HTTP body and its headers. Raises `BadRequest`."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadRequest(f"raw_input_contents has {len(raw)} tensors, inputs {len(request.inputs)}")
    inputs: list[dict[str, Any]] = []
    for i, tensor in enumerate(request.inputs):
        described = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
        options = parameters(tensor.parameters)
        if raw:
            options["binary_data_size"] = len(raw[i])
        else:
            described["data"] = _data(tensor)
        inputs.append({**described, "parameters": options})
    given = parameters(request.parameters)
    given.pop(EMPTY_END, None)
    body: dict[str, Any] = {"inputs": inputs, "parameters": {**given, "binary_data_output": True}}
    if request.id:
        body["id"] = request.id
    if request.outputs:
        body["outputs"] = [
            {"name": output.name, "parameters": parameters(output.parameters)}
            for output in request.outputs
        ]
    header = orjson.dumps(body)
    headers = {HEADER_LENGTH: str(len(header))} if raw else {}
    return b"".join([header, *raw]), headers


def _data(tensor: Any) -> list[Any]:
    """Return the values of a tensor's `contents`. Raises `BadRequest`."""
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        raise BadRequest(f"{tensor.name}: {tensor.datatype or 'a tensor'} is sent raw only")
    values = list(getattr(tensor.contents, field))
    return values if tensor.datatype != "BYTES" else [_text(tensor.name, v) for v in values]


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name} does not hold texts in UTF-8: {error}") from None


def one_text(request: Any) -> str:
    """Return the prompt of a request to a text model. Raises `BadRequest`."""
    if len(request.inputs) == 1 and request.inputs[0].name == "text":
        (tensor,), raw = request.inputs, request.raw_input_contents
        if tensor.datatype == "BYTES" and list(tensor.shape) in ([1], [1, 1]):
            values = list(tensor.contents.bytes_contents)
            if len(raw) == 1 and int.from_bytes(raw[0][:4], "little") == len(raw[0]) - 4:
                values = [raw[0][4:]]
            if len(values) == 1:
                return _text("text", values[0])
    raise BadRequest("inputs must be one text: name text, datatype BYTES, shape [1]")


def from_http(body: bytes, header_length: str | None) -> Any:
    """Convert an answer to a `ModelInferResponse`. Raises `WorkerFailed` for an invalid answer."""
    at = len(body) if header_length is None else int(header_length)
    response = ModelInferResponse()
    try:
        check_count(body[:at], MAX_VALUES)
        head = json.loads(body[:at])  # orjson does not accept NaN
        response.model_name, response.model_version = head["model_name"], head["model_version"]
        response.id = head.get("id", "")
        for name, value in head.get("parameters", {}).items():
            set_parameter(response.parameters, name, value)
        for tensor in head["outputs"]:
            described = {name: tensor[name] for name in ("name", "datatype", "shape")}
            output = response.outputs.add(**described)
            size = tensor.get("parameters", {}).get("binary_data_size")
            if size is None:
                values = tensor["data"]
                if output.datatype == "BYTES":
                    values = [value.encode() for value in values]
                getattr(output.contents, CONTENTS[output.datatype]).extend(values)
            elif not 0 <= size <= len(body) - at:
                raise ValueError(f"{tensor['name']} has {size} bytes")
            else:
                response.raw_output_contents.append(body[at : at + size])
                at += size
    except InvalidRequest:
        raise WorkerFailed(
            f"the JSON of the model's answer has more than {MAX_VALUES} values, as binary data it"
            " could have more"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WorkerFailed("the model's answer is none of the Open Inference Protocol") from None
    return response
