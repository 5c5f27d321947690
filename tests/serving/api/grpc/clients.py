"""Calls over gRPC by name, and streams of texts, in the protocol's own messages."""

from __future__ import annotations

from typing import Any

from serving.api.grpc.inference import SERVICE
from serving.api.grpc.messages import message, methods

PROMPT = "나 보기가"
WIDE_S = 60

ModelInferRequest = message("inference.ModelInferRequest")


class Client:
    """Calls by name, with our own messages."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __call__(
        self, name: str, request: Any = None, service: str = SERVICE, **options: Any
    ) -> Any:
        method = methods(service)[name]
        asked, answers = (message(t.full_name) for t in (method.input_type, method.output_type))
        sides = [
            "stream" if s else "unary" for s in (method.client_streaming, method.server_streaming)
        ]
        call = getattr(self._channel, "_".join(sides))(
            f"/{service}/{name}",
            request_serializer=asked.SerializeToString,
            response_deserializer=answers.FromString,
        )
        if not method.client_streaming:
            request = asked(**(request or {}))
        return call(request, timeout=WIDE_S, **options)


def asked(text: str = PROMPT, id: str = "", name: str = "봄", **parameters: Any) -> Any:
    tensor: dict[str, Any] = {"name": "text", "datatype": "BYTES", "shape": [1]}
    tensor["contents"] = {"bytes_contents": [text.encode()]}
    request = ModelInferRequest(model_name=name, id=id, inputs=[tensor])
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[key], kind, value)
    return request


def values(response: Any) -> dict[str, Any]:
    """Outputs by name."""
    inner = response.infer_response
    found = {}
    for output, raw in zip(inner.outputs, inner.raw_output_contents, strict=True):
        is_text = output.datatype == "BYTES"
        found[output.name] = raw[4:].decode() if is_text else int.from_bytes(raw, "little")
    return found


def final(response: Any) -> bool:
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)
