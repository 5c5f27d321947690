"""Handles requests for any model of tensors.

JSON object of the Open Inference Protocol (`handlers.tensors.v2`)  ->  its response
JSON, CSV or NPY of the one input                           ->  the one output, by Accept
JSON {"input": nested lists, ...}                           ->  likewise; several outputs: {...}
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from common.errors import DeadlineExceeded, EngineError, InvalidRequest
from common.media_types import BINARY, HEADER_SIZE, JSON, accepted, media_type
from common.worker_protocol import MAX_RESPONSE_BYTES
from handlers.tensors import codec, v2
from handlers.tensors.codec import Array
from handlers.v2 import is_request, split

MAX_ANSWER_BYTES = MAX_RESPONSE_BYTES - 65_536  # the rest is for the headers


class AnswerTooLarge(EngineError, status=413):
    """The outputs exceed Multi Model Server's limit for a response."""


@contextlib.contextmanager
def slot(slots: threading.Semaphore, end: float) -> Iterator[None]:
    """Hold one of `slots` in the block. Raises `DeadlineExceeded` at `end` (`time.monotonic`)."""
    left_s = end - time.monotonic()
    if left_s <= 0 or not slots.acquire(timeout=left_s):
        raise DeadlineExceeded("no answer within the timeout: other requests came first")
    try:
        yield
    finally:
        slots.release()


class TensorModel(Protocol):
    """A loaded model of tensors. Thread-safe."""

    metadata: v2.Metadata

    def run(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], timeout_s: float
    ) -> dict[str, Array]:
        """Compute the named outputs from complete, checked inputs. Raises `EngineError`."""


def describe(model: TensorModel) -> dict[str, Any]:
    """Return the answer to `GET /v2/models/{name}`."""
    return model.metadata.to_dict()


def transform_fn(
    model: TensorModel, body: bytes, content_type: str | None, accept: str | None, timeout_s: float
) -> tuple[bytes, str]:
    """Answer a request: returns the body and its content type. Raises `EngineError`."""
    kind, parameters = media_type(content_type)
    if kind == BINARY:
        header, binary = split(body, parameters.get(HEADER_SIZE, ""))
        if not header:
            return _answer_v2(model, *v2.raw_request(binary, model.metadata), timeout_s)
        return _answer_v2(model, codec.parse_json(header), binary, timeout_s)
    if kind != JSON:
        return _answer_plain(model, _only_input(model, body, kind), accept, timeout_s)
    value = codec.parse_json(body)
    if is_request(value):
        return _answer_v2(model, value, b"", timeout_s)
    return _answer_plain(model, _inputs(model, value), accept, timeout_s)


def _answer_v2(
    model: TensorModel, value: Any, binary: bytes, timeout_s: float
) -> tuple[bytes, str]:
    request, inputs = v2.parse(value, binary, model.metadata)
    outputs = model.run(inputs, list(request.outputs), timeout_s)
    _check_size({name: outputs[name] for name, as_bytes in request.outputs.items() if not as_bytes})
    body, content_type = v2.answer(request, outputs, model.metadata)
    _check_bytes(len(body))
    return body, content_type


def _answer_plain(
    model: TensorModel, inputs: Mapping[str, Array], accept: str | None, timeout_s: float
) -> tuple[bytes, str]:
    kind = accepted(accept, codec.MEDIA_TYPES)
    outputs = model.run(inputs, [spec.name for spec in model.metadata.outputs], timeout_s)
    _check_size(outputs, kind)
    body = codec.encode(outputs, kind)
    _check_bytes(len(body))
    return body, kind


def _only_input(model: TensorModel, body: bytes, kind: str) -> dict[str, Array]:
    specs = model.metadata.inputs
    if not specs or (len(specs) > 1 and kind in codec.MEDIA_TYPES):
        example = f'"{specs[0].name}": [...], ...' if specs else ""
        raise InvalidRequest(
            f"{kind} holds one tensor, but the model takes {codec.listed(specs)};"
            f" {JSON} holds them all: {{{example}}}"
        )
    return {specs[0].name: codec.decode(body, kind, specs[0])}


def _inputs(model: TensorModel, value: Any) -> dict[str, Array]:
    """Read the inputs from nested lists, or from an object of nested lists by name."""
    specs = {spec.name: spec for spec in model.metadata.inputs}
    known = codec.listed(model.metadata.inputs)
    if not isinstance(value, dict):
        if len(specs) != 1:
            raise InvalidRequest(f"the body must be a JSON object of {known}")
        value = {next(iter(specs)): value}
    if set(value) != set(specs):
        wrong = sorted(set(value) ^ set(specs))
        raise InvalidRequest(
            f"{wrong[0][:100]} is {'missing' if wrong[0] in specs else 'not known'}; the model"
            f" takes {known}"
        )
    inputs = {}
    for name, nested in value.items():
        array = codec.from_values(nested, specs[name])
        specs[name].check_shape(array.shape)
        inputs[name] = array
    return inputs


def _check_size(outputs: Mapping[str, Array], kind: str = JSON) -> None:
    """Raise `AnswerTooLarge` before encoding, by the least size that the outputs can have.

    In JSON and CSV a value takes at least two bytes. In NPY each text takes four bytes per
    character of the longest.
    """
    bytes_per_value = 2
    if kind == codec.NPY:
        texts = chain.from_iterable(a.flat for a in outputs.values() if a.dtype == object)
        bytes_per_value = 4 * max((len(str(text)) for text in texts), default=0) or 2
    _check_bytes(sum(bytes_per_value * array.size for array in outputs.values()))


def _check_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_ANSWER_BYTES:
        raise AnswerTooLarge(
            f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB: request fewer outputs, binary"
            " data, or send fewer rows"
        )
