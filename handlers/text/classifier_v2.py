"""The Open Inference Protocol for a classifier: texts in, labels and logits out.

{"inputs": [{"name": "text", "shape": [N], "datatype": "BYTES", "data": [...]}]}, perhaps with
    "text_pair" of the same shape
    -> label (BYTES) and score (FP32), of shape [N], logits (FP32) of shape [N, labels]; of a
       classifier of tokens: entities (BYTES), each the JSON of a text's list
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from common.hints import HINTS
from handlers import v2
from handlers.payload import to_json
from handlers.text.bulk import Convert
from handlers.text.labels import Options, entities, ranked

VERSION = "1"
INPUTS = {"text": "BYTES [batch]", "text_pair": "BYTES [batch]"}
DATATYPES = {"label": "BYTES", "score": "FP32", "logits": "FP32"}
TOKEN_DATATYPES = {"entities": "BYTES"}


@dataclass(frozen=True)
class TextRequest:
    """A checked request: its texts, each a text or `{"text", "text_pair"}`."""

    v2: v2.InferRequest
    texts: list[Any]

    @property
    def parameters(self) -> dict[str, Any]:
        return {k: v for k, v in self.v2.parameters.items() if k not in HINTS}

    def converter(self, about: Mapping[str, Any], options: Options) -> Convert:
        """Return what makes a text's entries: its entities, or label, score and logits if sent."""

        def convert(parts: Sequence[str], result: Mapping[str, Any]) -> list[Any]:
            if about["of_tokens"]:
                return entities(parts[0], result, about["labels"], options)
            logits = result["logits"][0]
            best = ranked(logits, about["labels"], options.function or about["function"])[0]
            return [*best, *(logits if "logits" in self.v2.outputs else ())]

        return convert


def _datatypes(about: Mapping[str, Any]) -> Mapping[str, str]:
    return TOKEN_DATATYPES if about["of_tokens"] else DATATYPES


def metadata(name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to `GET /v2/models/{name}`; `about` is the engine's description."""
    shapes = {"logits": [-1, len(about["labels"])]}
    outputs = [
        {"name": n, "datatype": t, "shape": shapes.get(n, [-1])}
        for n, t in _datatypes(about).items()
    ]
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "kogpt2_classifier",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": outputs,
    }


def parse(raw: bytes, content_type: str | None, about: Mapping[str, Any]) -> TextRequest | None:
    """Parse a V2 request; return None for any other body.

    Raises `InvalidRequest`, `UnsupportedMediaType`.
    """
    value, binary = v2.read_texts(raw, content_type)
    if not v2.is_request(value):
        return None
    names = {entry["name"] for entry in value["inputs"] if isinstance(entry["name"], str)}
    inputs = {name: what for name, what in INPUTS.items() if name in names or name == "text"}
    request = v2.parse(value, binary, inputs, list(_datatypes(about)))
    columns = {tensor.name: _texts(tensor) for tensor in request.inputs}
    pairs = columns.get("text_pair")
    if pairs is None:
        return TextRequest(request, columns["text"])
    if len(pairs) != len(columns["text"]):
        raise InvalidRequest(f"text has {len(columns['text'])} texts, but text_pair {len(pairs)}")
    pairs = [{"text": a, "text_pair": b} for a, b in zip(columns["text"], pairs, strict=True)]
    return TextRequest(request, pairs)


def _texts(tensor: v2.Tensor) -> list[Any]:
    """Return the texts of a tensor of shape [N] or [N, 1]."""
    shape = list(tensor.shape)
    data = tensor.data
    if isinstance(data, bytes):
        data = v2.unpack_texts(data, tensor.name)
    elif isinstance(data, list) and len(shape) == 2:
        data = [x for row in data for x in (row if isinstance(row, list) else [row])]
    if len(shape) not in (1, 2) or shape[1:] not in ([], [1]):
        raise InvalidRequest(f"shape of {tensor.name} is {shape}, must be [batch]")
    if not isinstance(data, list) or len(data) != shape[0]:
        count = len(data) if isinstance(data, list) else 0
        raise InvalidRequest(f"{tensor.name} has {count} texts, but the shape {shape}")
    return data


def answer(
    request: TextRequest, name: str, rows: Sequence[list[Any]], about: Mapping[str, Any]
) -> tuple[bytes, str]:
    """Encode the entries of each text as a V2 body and its content type."""
    columns: dict[str, list[Any]]
    if about["of_tokens"]:
        columns = {"entities": [to_json(row).decode() for row in rows]}
    else:
        columns = {
            "label": [label for label, *_ in rows],
            "score": [score for _, score, *_ in rows],
            "logits": [x for row in rows for x in row[2:]],
        }
    datatypes, tensors = _datatypes(about), []
    for output, as_bytes in request.v2.outputs.items():
        values: Any = columns[output]
        shape = [len(rows), len(about["labels"])] if output == "logits" else [len(rows)]
        if as_bytes:
            texts_ = datatypes[output] == "BYTES"
            values = v2.pack_texts(values) if texts_ else struct.pack(f"<{len(values)}f", *values)
        tensors.append(v2.Tensor(output, datatypes[output], shape, values))
    return v2.answer(name, VERSION, request.v2, tensors, to_json)
