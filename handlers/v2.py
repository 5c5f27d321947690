"""Parses and formats the Open Inference Protocol (V2): JSON, followed by binary tensors.

{"id", "inputs": [{"name", "shape", "datatype", "data"}], "outputs": [{"name"}]}
    -> {"model_name", "model_version", "id", "outputs": [{"name", "shape", "datatype", "data"}]}

The content type has the length of the JSON, as on SageMaker; the gateway translates the protocol's
own header for it. Does not import numpy, to save memory in workers of text models.

https://github.com/kserve/open-inference-protocol
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest, quoted
from common.json_body import MAX_VALUES, read_json
from common.media_types import BINARY, HEADER_SIZE, JSON, media_type

# KServe's client sends `model_name`, which repeats the name in the path.
FIELDS = ("id", "model_name", "parameters", "inputs", "outputs")
INPUT_FIELDS = ("name", "shape", "datatype", "parameters", "data")
OUTPUT_FIELDS = ("name", "parameters")


@dataclass(frozen=True)
class Tensor:
    """A tensor; `data` is its bytes or values: nested as the client sent them, flat in answers."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any


@dataclass(frozen=True)
class InferRequest:
    """A request; `outputs` maps the names of requested outputs to whether to send them as bytes."""

    inputs: list[Tensor]
    outputs: dict[str, bool]
    parameters: Mapping[str, Any]
    id: str | None = None


def is_request(value: Any) -> bool:
    """Return whether a JSON body is a request of the Open Inference Protocol."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("inputs"), list)
        and all(isinstance(i, dict) and "name" in i for i in value["inputs"])
    )


def split(body: bytes, header_size: str) -> tuple[bytes, bytes]:
    """Split a body into the JSON and the binary tensors after it. Raises `InvalidRequest`."""
    known = header_size.isdecimal() and len(header_size) < 16
    if not known or int(header_size) > len(body):
        raise InvalidRequest(
            f"the length of the JSON is {header_size[:50]!r}, must be a number of bytes up to"
            f" {len(body)}, the body's"
        )
    return body[: int(header_size)], body[int(header_size) :]


def read_texts(raw: bytes, content_type: str | None) -> tuple[Any, bytes]:
    """Return the JSON of a body for a model of texts, and the binary tensors behind it.

    None in place of JSON for a body that is no V2 request. Raises `InvalidRequest`,
    `UnsupportedMediaType`.
    """
    kind, options = media_type(content_type)
    if kind == BINARY:
        raw, binary = split(raw, options.get(HEADER_SIZE, ""))
        if raw:
            return read_json(raw, MAX_VALUES), binary
        return raw_request("text", "BYTES", [1], binary)
    if b'"datatype"' in raw:
        # A body that is not JSON is plain text with that word, or `handlers.payload` reports it.
        with contextlib.suppress(InvalidRequest):
            return read_json(raw, MAX_VALUES), b""
    return None, b""


def raw_request(
    name: str, datatype: str, shape: Sequence[int], data: bytes
) -> tuple[dict[str, Any], bytes]:
    """Convert Triton's raw request, without JSON, to a request and the bytes of its only input."""
    if datatype == "BYTES":
        data = struct.pack("<I", len(data)) + data
    size = {"binary_data_size": len(data)}
    tensor = {"name": name, "datatype": datatype, "shape": list(shape), "parameters": size}
    return {"inputs": [tensor], "parameters": {"binary_data_output": True}}, data


def parse(
    value: Any,
    binary: bytes,
    inputs: Mapping[str, str],
    outputs: Sequence[str],
    unserved: Mapping[str, str] | None = None,
) -> InferRequest:
    """Check a request except the shapes and data of its tensors.

    `inputs` maps the model's inputs to their types, such as `INT64 [batch, sequence]`; `unserved`
    its outputs that are no tensors to their types. Raises `InvalidRequest` with the field and a
    right value.
    """
    if not is_request(value):
        raise InvalidRequest('the body must be {"inputs": [{"name", "shape", "datatype", "data"}]}')
    _check_fields(value, FIELDS, "")
    request_id = value.get("id")
    if not isinstance(request_id, str | None):
        raise InvalidRequest("id must be a string")
    tensors: dict[str, Tensor] = {}
    rest = binary
    for entry in value["inputs"]:
        name = entry["name"]
        if not isinstance(name, str) or name not in inputs:
            raise InvalidRequest(f"input {quoted(name)} is not known; known are {_listed(inputs)}")
        if name in tensors:
            raise InvalidRequest(f"input {name} is there twice, must be once")
        _check_fields(entry, INPUT_FIELDS, f"inputs.{name}.")
        datatype, right = entry.get("datatype"), inputs[name].partition(" ")[0]
        if datatype != right:
            raise InvalidRequest(f"{name} has datatype {quoted(datatype, 50)}, must be {right}")
        data = entry.get("data")
        size = _parameters(entry, f"inputs.{name}: ").get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(rest):
                raise InvalidRequest(
                    f"binary_data_size of {name} is {quoted(size, 50)}, but {len(rest)} bytes are"
                    " left"
                )
            data, rest = rest[:size], rest[size:]
        shape = entry.get("shape")
        if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
            raise InvalidRequest(f"shape of {name} must be a list of sizes, {inputs[name]}")
        tensors[name] = Tensor(name, right, shape, data)
    if rest:
        raise InvalidRequest(f"{len(rest)} bytes follow the last binary tensor, must be none")
    missing = {name: what for name, what in inputs.items() if name not in tensors}
    if missing:
        raise InvalidRequest(f"missing: {_listed(missing)}")
    parameters = dict(_parameters(value, ""))
    as_bytes = bool(parameters.pop("binary_data_output", False))
    requested = _outputs(value, outputs, unserved or {}, as_bytes)
    return InferRequest(list(tensors.values()), requested, parameters, request_id)


def _listed(inputs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {what}" for name, what in inputs.items())


def _check_fields(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in value:
        if name not in known:
            raise InvalidRequest(f"{where}{name} is not known; known are {', '.join(known)}")


def _parameters(value: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the `parameters` object. Unknown names are allowed: they are for other servers."""
    parameters = value.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}parameters must be a JSON object")
    for name in ("shared_memory_region", "classification"):
        if name in parameters:
            raise InvalidRequest(f"{where}{name} is not supported")
    return parameters


def _outputs(
    value: Mapping[str, Any], known: Sequence[str], unserved: Mapping[str, str], as_bytes: bool
) -> dict[str, bool]:
    """List the requested outputs, or all; `as_bytes` is the default of their `binary_data`."""
    requested = value.get("outputs") or [{"name": name} for name in known]
    outputs: dict[str, bool] = {}
    for output in requested if isinstance(requested, list) else [None]:
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise InvalidRequest('outputs must be a list of {"name": ...}')
        name = output["name"]
        if name in unserved:
            raise InvalidRequest(f"output {name} is no tensor but {unserved[name]}")
        if name not in known:
            raise InvalidRequest(f"output {name[:100]} is not known; known are {', '.join(known)}")
        _check_fields(output, OUTPUT_FIELDS, f"outputs.{name}.")
        hints = _parameters(output, f"outputs.{name}: ")
        outputs[name] = bool(hints.get("binary_data", as_bytes))
    return outputs


def answer(
    model: str,
    version: str,
    request: InferRequest,
    outputs: Sequence[Tensor],
    to_json: Callable[[Any], bytes],
) -> tuple[bytes, str]:
    """Encode an answer as body and content type; tensors whose data is bytes follow the JSON."""
    entries, binaries = [], []
    for tensor in outputs:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if isinstance(tensor.data, bytes):
            binaries.append(tensor.data)
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
        else:
            entry["data"] = tensor.data
        entries.append(entry)
    id = {} if request.id is None else {"id": request.id}
    header = to_json({"model_name": model, "model_version": version, **id, "outputs": entries})
    if not binaries:
        return header, JSON
    return b"".join([header, *binaries]), f"{BINARY};{HEADER_SIZE}={len(header)}"


def pack_texts(texts: Sequence[str]) -> bytes:
    """Encode each text in UTF-8 after its length in bytes, a little-endian uint32."""
    encoded = [text.encode("utf-8") for text in texts]
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)


def unpack_texts(data: bytes, name: str) -> list[str]:
    """Decode the bytes of `pack_texts` to texts. Raises `InvalidRequest`."""
    texts, at = [], 0
    try:
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            at += 4 + size
            if at > len(data):
                raise InvalidRequest(f"the last text of {name} is cut short")
            texts.append(data[at - size : at].decode("utf-8"))
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name} does not hold texts in UTF-8: {error}") from None
    return texts
