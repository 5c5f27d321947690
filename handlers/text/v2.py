"""The Open Inference Protocol for a text model: one text in, the generated texts out.

{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["..."]}],
 "parameters": {"max_new_tokens": 16}}
    -> generated_text, finish_reason (BYTES) and tokens (INT64), each of shape [sequences]

Converts such a request to one of `handlers.payload`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.hints import HINTS
from handlers import v2
from handlers.payload import GenerateRequest, from_object, to_json

DATATYPES = {"generated_text": "BYTES", "tokens": "INT64", "finish_reason": "BYTES"}
INPUT = '{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["..."]}'
VERSION = "1"


def metadata(name: str) -> dict[str, Any]:
    """Return the answer to `GET /v2/models/{name}`."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "kogpt2",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"name": n, "datatype": t, "shape": [-1]} for n, t in DATATYPES.items()],
    }


def parse(raw: bytes, content_type: str | None) -> tuple[v2.InferRequest, GenerateRequest] | None:
    """Parse a V2 request: returns it and the request for a text; None for any other body.

    Raises `InvalidRequest`, `UnsupportedMediaType`.
    """
    value, binary = v2.read_texts(raw, content_type)
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), list):
        return None
    match value["inputs"]:
        case [{"name": "text", "datatype": "BYTES", "shape": [1] | [1, 1]}]:
            request = v2.parse(value, binary, {"text": "BYTES [1]"}, list(DATATYPES))
            parameters = {k: v for k, v in request.parameters.items() if k not in HINTS}
            plain = {"inputs": _text(request.inputs[0].data), "parameters": parameters}
            return request, from_object(plain)
    raise InvalidRequest(f"inputs must be one text, [{INPUT}]")


def _text(data: Any) -> str:
    if isinstance(data, bytes):
        data = v2.unpack_texts(data, "text")
    while isinstance(data, list) and len(data) == 1:
        data = data[0]
    if not isinstance(data, str):
        raise InvalidRequest(f"inputs must be one text, [{INPUT}]")
    return data


def answer(
    request: v2.InferRequest, sequences: Sequence[Mapping[str, Any]], name: str
) -> tuple[bytes, str]:
    """Encode the results of `handlers.payload.sequences_of` as a V2 body and its content type."""
    tensors = []
    for output, as_bytes in request.outputs.items():
        values = [sequence[output] for sequence in sequences]
        data: Any = values
        if as_bytes:
            texts = DATATYPES[output] == "BYTES"
            data = v2.pack_texts(values) if texts else struct.pack(f"<{len(values)}q", *values)
        tensors.append(v2.Tensor(output, DATATYPES[output], [len(values)], data))
    return v2.answer(name, VERSION, request, tensors, to_json)
