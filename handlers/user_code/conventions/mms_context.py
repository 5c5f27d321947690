"""Multi Model Server's context, as scripts know it, and a request's values.

Its classes are MMS's own; what differs is that headers are found whatever their case (the gateway
writes them small) and that metrics are made when they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mms.context import Context, RequestProcessor

from common.errors import InvalidRequest
from common.media_types import JSON
from handlers.payload import to_json
from handlers.user_code.messages import Answer, Request, ScriptError

TEXT, BYTES = "text/plain; charset=utf-8", "application/octet-stream"


class Headers(dict[str, Any]):
    """A request's headers under names as in `Content-Type`, found in any case."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__({_titled(name): value for name, value in headers.items()})
        self._names = {name.lower(): name for name in self}

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._names.get(name.lower(), name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._names

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._names.get(name.lower(), name), default)


def _titled(name: str) -> str:
    return "-".join(part.capitalize() for part in name.split("-"))


class ScriptContext(Context):  # type: ignore[misc]
    """`requests` of the batch are at their indices; none while the model is loaded."""

    _metrics: Any

    def __init__(self, spec: Mapping[str, Any], requests: Sequence[Request] = ()) -> None:
        super().__init__(
            spec["name"],
            spec["root"],
            spec["manifest"],
            spec["batch_size"],
            spec["gpu_id"],
            "1.1.11",
        )
        self.request_ids = {i: request.id for i, request in enumerate(requests)}
        self.request_processor = [
            RequestProcessor(Headers(request.headers)) for request in requests
        ]

    @property
    def metrics(self) -> Any:
        if self._metrics is None:
            from mms.metrics.metrics_store import MetricsStore

            self._metrics = MetricsStore(self.request_ids, self.model_name)
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Any) -> None:
        self._metrics = metrics


def answer_of(value: Any, kind: str | None, processor: RequestProcessor, what: str) -> Answer:
    """What a script returned for a request, with the status and headers that it has set.

    Bytes and text go out as they are, anything else as JSON. Raises `ScriptError` for what cannot
    be sent; Multi Model Server's worker would die of it.
    """
    if value is None:
        raise ScriptError(f"{what} returned nothing (None), must return bytes, text or JSON values")
    if isinstance(value, bytes | bytearray | memoryview):
        body, own = bytes(value), BYTES
    elif isinstance(value, str):
        body, own = value.encode("utf-8", "replace"), TEXT
    else:
        try:
            body = to_json(value)
        except (TypeError, ValueError, RecursionError):
            name = type(value).__name__
            raise ScriptError(
                f"{what} returned a {name}, must return bytes, text or JSON values"
            ) from None
        own = JSON
    headers = {
        name.lower() if isinstance(name, str) else name: header
        for name, header in processor.get_response_headers().items()
    }
    status = processor.get_response_status_code()
    kind = headers.pop("content-type", None) or kind or own
    return Answer(b"" if status in (204, 304) else body, kind, status, headers)


def decoded(request: Request) -> dict[str, Any]:
    """The values as Multi Model Server gives them to a service: JSON and text decoded.

    Raises `InvalidRequest`.
    """
    values: dict[str, Any] = {}
    for part in request.parts:
        try:
            if part.content_type == JSON:
                values[part.name] = json.loads(part.value.decode("utf-8"))
            elif part.content_type.startswith("text"):
                values[part.name] = part.value.decode("utf-8")
            else:
                values[part.name] = bytearray(part.value)
        except (ValueError, RecursionError) as error:
            kind = "JSON" if part.content_type == JSON else "UTF-8"
            raise InvalidRequest(f"{part.name} is not {kind}: {error}") from None
    return values
