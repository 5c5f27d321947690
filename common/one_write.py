"""Sends a response's head and body in one write, for uvicorn's protocol on httptools.

uvloop sends each write at once, so a client would wake for the head and wait again for the body.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# Longer bodies are not copied, but written separately from their heads.
MAX_BYTES = 65_536


def join(cycle: RequestResponseCycle, message: Any) -> None:
    """Delay the head of a response with a Content-Length until its body is written.

    Call this with each ASGI message before it is sent.
    """
    if (
        message["type"] == "http.response.start"
        and cycle.scope["method"] != "HEAD"
        and any(name == b"content-length" for name, _ in message["headers"])
    ):
        cycle.transport = _Joining(cycle.transport)  # type: ignore[assignment]


class _Joining:
    """A transport that joins the first write with the second."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._first: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._first is None:
            self._first = data
        elif self._first and len(data) <= MAX_BYTES:
            self._first, data = b"", self._first + data
            self._transport.write(data)
        else:
            self._flush()
            self._transport.write(data)

    def _flush(self) -> None:
        if self._first:
            self._transport.write(self._first)
            self._first = b""

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
