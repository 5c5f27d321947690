"""A client's request, with the record of it that routes fill in, errors and the log line use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import starlette.requests
from starlette.requests import ClientDisconnect

from common.errors import ServiceError
from serving.api.gateway import Gateway
from serving.tokens import Token

Shape = Callable[[ServiceError], Mapping[str, Any]]  # an error's body in a contract's format


@dataclass
class LineCounts:
    """The lines of a batch that have begun, and those of them that an error answered."""

    lines: int = 0
    error_lines: int = 0


@dataclass
class RequestState:
    """The record of one request. `App` makes it; each line of a batch has one of its own.

    request_id, traceparent: the client's; else a new id, and None
    started: arrival of the head, on the monotonic clock
    model, alias: the named model (None until it is known), and the alias that it was named by
    token: the token of TOKENS_FILE that counts this request as in flight, until the answer's end
    token_name: its name, set also if its limits refuse the request
    counted: how a call of a model is counted in the metrics
    shape: the format of errors, if the body determines it
    body_bytes: this request's part of `Gateway.body_bytes`
    batch: how far a body of JSON lines is answered
    """

    request_id: str
    traceparent: str | None
    started: float
    model: str | None = None
    alias: str | None = None
    token: Token | None = None
    token_name: str | None = None
    counted: Counted | None = None
    shape: Shape | None = None
    body_bytes: int = 0
    batch: LineCounts | None = None

    def of_line(self, number: int) -> RequestState:
        """Return the record of a batch's line, which is authorized and counted by itself."""
        return replace(
            self,
            request_id=f"{self.request_id}-{number}",
            started=time.monotonic(),
            token=None,
            counted=None,
            shape=None,
            body_bytes=0,
        )


class Request(starlette.requests.Request[Any]):
    """Starlette's request, whose state is a `RequestState`."""

    @property
    def state(self) -> RequestState:
        state: RequestState = self.scope["state"]
        return state


class Counted:
    """Counts a request as in flight for as long as the context lasts, then in the metrics."""

    def __init__(self, gateway: Gateway, request: Request) -> None:
        self._gateway = gateway
        request.state.counted = self
        self._started = time.monotonic()
        self.model = ""  # set once the model exists: unknown names must not become labels
        self.status = 200  # 0: it is not counted in the metrics

    def __enter__(self) -> Counted:
        self._gateway.requests += 1
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ServiceError):
            self.status = error.status
        elif isinstance(error, ClientDisconnect | asyncio.CancelledError):
            self.status = 499
        elif error is not None:
            self.status = 500
        self._gateway.requests -= 1
        seconds = time.monotonic() - self._started
        if self.status:
            self._gateway.metrics.request(self.model, self.status, seconds)
