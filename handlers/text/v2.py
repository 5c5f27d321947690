"""The Open Inference Protocol for a text model: one text in, the generated ones out.

{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["..."]}],
 "parameters": {"max_new_tokens": 16}}
    -> generated_text, finish_reason (BYTES) and tokens (INT64), each of shape [sequences]

Rewrites such a request into one of `handlers.payload`, and its answer back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from common.json_body import read_json
from common.media_types import JSON
from handlers.payload import to_json
from handlers.v2_binary import BINARY, HEADER_SIZE, joined, pack_texts, split, unpack_texts

DATATYPES = {"generated_text": "BYTES", "tokens": "INT64", "finish_reason": "BYTES"}
INPUT = '{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["..."]}'
VERSION = "1"


@dataclass(frozen=True)
class TextRequest:
    """`outputs` maps the names asked for, in order, to whether they are sent as bytes."""

    body: bytes  # of `handlers.payload`
    outputs: Mapping[str, bool]
    id: str | None


def metadata(name: str) -> dict[str, Any]:
    """As `GET /v2/models/{name}` answers."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "kogpt2",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"name": n, "datatype": t, "shape": [-1]} for n, t in DATATYPES.items()],
    }


def parse(body: bytes | bytearray | str, content_type: str | None) -> TextRequest | None:
    """None for what is no request of this protocol. Raises `InvalidRequest`."""
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
    binary = b""
    kind, _, size = (content_type or "").partition(f";{HEADER_SIZE}=")
    if kind == BINARY:
        raw, binary = split(raw, size)
    elif b'"datatype"' not in raw:
        return None
    try:
        value = read_json(raw)
    except InvalidRequest:
        if kind == BINARY:
            raise
        return None  # a plain text that speaks of datatypes, or for `handlers.payload` to refuse
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), list):
        return None
    for name in value:
        if name not in ("id", "inputs", "outputs", "parameters"):
            raise InvalidRequest(f"{name} is not known; known are id, inputs, outputs, parameters")
    if not isinstance(value.get("id"), str | None):
        raise InvalidRequest("id must be a string")
    parameters = dict(_hints(value))
    as_bytes = bool(parameters.pop("binary_data_output", False))
    plain = {"inputs": _text(value["inputs"], binary), "parameters": parameters}
    outputs = _outputs(value.get("outputs"), as_bytes)
    return TextRequest(to_json(plain), outputs, value.get("id"))


def _hints(value: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = value.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters must be a JSON object")
    return parameters


def _text(inputs: list[Any], binary: bytes) -> str:
    match inputs:
        case [{"name": "text", "datatype": "BYTES", "shape": [1] | [1, 1], **rest}]:
            given: dict[str, Any] = {str(name): value for name, value in rest.items()}
            data = given.get("data")
            if binary and _hints(given).get("binary_data_size") == len(binary):
                data = unpack_texts(binary, "text")
            while isinstance(data, list) and len(data) == 1:
                data = data[0]
            if isinstance(data, str):
                return data
    raise InvalidRequest(f"inputs must be one text, [{INPUT}]")


def _outputs(asked: Any, as_bytes: bool) -> dict[str, bool]:
    """`as_bytes` is the request's own wish, where an output has none."""
    known = ", ".join(DATATYPES)
    asked = asked or [{"name": name} for name in DATATYPES]
    if not isinstance(asked, list) or not all(isinstance(o, dict) and "name" in o for o in asked):
        raise InvalidRequest(f'outputs must be a list of {{"name": ...}}; known are {known}')
    outputs = {}
    for output in asked:
        name = output["name"]
        if not isinstance(name, str) or name not in DATATYPES:
            raise InvalidRequest(f"output {name!r:.100} is not known; known are {known}")
        outputs[name] = bool(_hints(output).get("binary_data", as_bytes))
    return outputs


def answer(request: TextRequest, plain: bytes, name: str) -> tuple[bytes, str]:
    """The body and its content type; `plain` is what `handlers.payload` answers."""
    value = json.loads(plain)
    sequences = value.get("sequences", [value])
    body: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if request.id is not None:
        body["id"] = request.id
    body["outputs"] = []
    pieces = []
    for output, as_bytes in request.outputs.items():
        values = [sequence[output] for sequence in sequences]
        datatype = DATATYPES[output]
        entry: dict[str, Any] = {"name": output, "datatype": datatype, "shape": [len(values)]}
        if as_bytes:
            texts = datatype == "BYTES"
            piece = pack_texts(values) if texts else struct.pack(f"<{len(values)}q", *values)
            entry["parameters"] = {"binary_data_size": len(piece)}
            pieces.append(piece)
        else:
            entry["data"] = values
        body["outputs"].append(entry)
    header = to_json(body)
    return joined(header, pieces) if pieces else (header, JSON)
