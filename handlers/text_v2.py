"""The Open Inference Protocol for a text model: one text in, the generated ones out.

{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["..."]}],
 "parameters": {"max_new_tokens": 16}}
    -> generated_text, finish_reason (BYTES) and tokens (INT64), each of shape [sequences]

Rewrites such a request into one of `handlers.payload`, and its answer back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest

DATATYPES = {"generated_text": "BYTES", "tokens": "INT64", "finish_reason": "BYTES"}
INPUT = '{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["..."]}'
VERSION = "1"


@dataclass(frozen=True)
class TextRequest:
    body: bytes  # of `handlers.payload`
    outputs: Sequence[str]
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


def parse(body: bytes | bytearray | str) -> TextRequest | None:
    """None for what is no request of this protocol. Raises `InvalidRequest`."""
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    if b'"datatype"' not in raw:
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), list):
        return None
    for name in value:
        if name not in ("id", "inputs", "outputs", "parameters"):
            raise InvalidRequest(f"{name} is not known; known are id, inputs, outputs, parameters")
    if not isinstance(value.get("id"), str | None):
        raise InvalidRequest("id must be a string")
    plain = {"inputs": _text(value["inputs"]), "parameters": value.get("parameters") or {}}
    return TextRequest(json.dumps(plain).encode(), _outputs(value.get("outputs")), value.get("id"))


def _text(inputs: list[Any]) -> str:
    match inputs:
        case [{"name": "text", "datatype": "BYTES", "shape": [1] | [1, 1], "data": data}]:
            while isinstance(data, list) and len(data) == 1:
                data = data[0]
            if isinstance(data, str):
                return data
    raise InvalidRequest(f"inputs must be one text, [{INPUT}]")


def _outputs(asked: Any) -> list[str]:
    if not asked:
        return list(DATATYPES)
    known = ", ".join(DATATYPES)
    if not isinstance(asked, list) or not all(isinstance(o, dict) and "name" in o for o in asked):
        raise InvalidRequest(f'outputs must be a list of {{"name": ...}}; known are {known}')
    for output in asked:
        if output["name"] not in DATATYPES:
            raise InvalidRequest(f"output {output['name']!r:.100} is not known; known are {known}")
        if (output.get("parameters") or {}).get("binary_data"):
            raise InvalidRequest("a text model answers in JSON only: ask for no binary data")
    return [output["name"] for output in asked]


def answer(request: TextRequest, plain: bytes, name: str) -> bytes:
    """`plain` is what `handlers.payload` answers."""
    value = json.loads(plain)
    sequences = value.get("sequences", [value])
    body: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if request.id is not None:
        body["id"] = request.id
    body["outputs"] = [
        {
            "name": output,
            "datatype": DATATYPES[output],
            "shape": [len(sequences)],
            "data": [sequence[output] for sequence in sequences],
        }
        for output in request.outputs
    ]
    return json.dumps(body, ensure_ascii=False).encode("utf-8")
