"""Multi Model Server's context for scripts, and conversion of requests and answers.

Uses MMS's own classes. Two differences: names of headers match in any case (the gateway sends lower
case), and metrics are created on first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mms.context import Context, RequestProcessor

from common.json_body import read_json, read_text
from common.media_types import JSON
from handlers.payload import to_json
from handlers.user_code.messages import Answer, Request, ScriptError

TEXT, BYTES = "text/plain; charset=utf-8", "application/octet-stream"


class Headers(dict[str, Any]):
    """A request's headers, by names like `Content-Type`; lookups ignore case."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        titles = {name: "-".join(map(str.capitalize, name.split("-"))) for name in headers}
        super().__init__({titles[name]: value for name, value in headers.items()})
        self._names = {name.lower(): name for name in self}

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._names.get(name.lower(), name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._names

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._names.get(name.lower(), name), default)


class ScriptContext(Context):  # type: ignore[misc]
    """Multi Model Server's context of a batch; it has no requests while the model loads."""

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


def to_answer(value: Any, kind: str | None, processor: RequestProcessor, what: str) -> Answer:
    """Convert a script's return value: bytes and text as they are, any other value as JSON.

    Adds the status and headers that the script has set. Raises `ScriptError` for a value that
    cannot be sent, which would crash Multi Model Server's worker.
    """
    if value is None:
        raise ScriptError(f"{what} returned nothing (None), must return bytes, text or JSON values")
    if isinstance(value, bytes | bytearray | memoryview):
        body, default_type = bytes(value), BYTES
    elif isinstance(value, str):
        body, default_type = value.encode("utf-8", "replace"), TEXT
    else:
        try:
            body = to_json(value)
        except (TypeError, ValueError, RecursionError):
            name = type(value).__name__
            raise ScriptError(
                f"{what} returned a {name}, must return bytes, text or JSON values"
            ) from None
        default_type = JSON
    headers = {
        name.lower() if isinstance(name, str) else name: header
        for name, header in processor.get_response_headers().items()
    }
    status = processor.get_response_status_code()
    kind = headers.pop("content-type", None) or kind or default_type
    return Answer(b"" if status in (204, 304) else body, kind, status, headers)


def decode(request: Request) -> dict[str, Any]:
    """Decode a request's values as MMS does, if JSON or text. Raises `InvalidRequest`."""
    values: dict[str, Any] = {}
    for part in request.parts:
        if part.content_type == JSON:
            values[part.name] = read_json(part.value, source=part.name)
        elif part.content_type.startswith("text"):
            values[part.name] = read_text(part.value, part.name)
        else:
            values[part.name] = bytearray(part.value)
    return values
