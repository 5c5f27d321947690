"""The workers' synchronous client of the engine. Standard library only.

A worker's model is a `ModelHandle`: after a restart of the engine it loads its model again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common.errors import EngineError, EngineUnavailable, ModelNotFound, named
from engine.http.connection import Connection

LOAD_TIMEOUT_S = 300.0
# How long requests wait for a restart of the engine. If a restart takes longer, they fail.
RECONNECT_S = 15.0
# How long after the deadline of a request the engine may still answer, with the deadline's error.
GRACE_S = 5.0


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path | str, timeout_s: float = 60.0) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def error_of(status: int, body: bytes, retry_after: str | None) -> EngineError:
    """Return the exception for an error response of the engine."""
    retry_after_s = float(retry_after) if retry_after else None
    try:
        error = json.loads(body)
        kind, message = error["type"], error["message"]
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"the engine answered {status}"
    return named(kind, message, retry_after_s) or EngineError(message, retry_after_s=retry_after_s)


class Uses:
    """The connections with requests for a model, so that all can be aborted at once."""

    def __init__(self) -> None:
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.ended = False

    @contextlib.contextmanager
    def of(self, used: socket.socket) -> Iterator[None]:
        """Register a connection during a request. Raises `ModelNotFound` after `end`."""
        with self._lock:
            if self.ended:
                raise ModelNotFound("the model is unloaded")
            self._sockets.add(used)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(used)

    def end(self) -> None:
        """Shut down all connections; the engine then cancels their requests."""
        with self._lock:
            self.ended = True
            for used in self._sockets:
                with contextlib.suppress(OSError):
                    used.shutdown(socket.SHUT_RDWR)


class EngineClient:
    """A client of the engine, with a connection for each thread that uses it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._local = threading.local()

    def request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        uses: Uses | None = None,
    ) -> Any:
        """Return the parsed answer. Raises the engine's error, or `EngineUnavailable`."""
        connection: Connection | None = getattr(self._local, "connection", None)
        payload = None if body is None else json.dumps(body).encode()
        for fresh in (connection is None, True):
            try:
                if fresh:
                    self.close()
                    connection = self._local.connection = Connection(self._path, timeout_s)
                assert connection is not None
                with uses.of(connection.socket) if uses else contextlib.nullcontext():
                    status, headers, content = connection.request(method, url, payload, timeout_s)
            except TimeoutError as error:
                self.close()
                message = f"the engine did not answer within {timeout_s:.0f} s"
                raise EngineUnavailable(message) from error
            except OSError as error:
                self.close()
                if not fresh and isinstance(error, BrokenPipeError | ConnectionResetError):
                    continue  # the connection was closed while it was idle
                raise EngineUnavailable("the engine does not answer") from error
            if headers.get("connection") == "close":
                self.close()
            if status >= 400:
                raise error_of(status, content, headers.get("retry-after"))
            return json.loads(content) if content else None
        raise EngineUnavailable("the engine does not answer")

    def close(self) -> None:
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def lease(
        self, name: str, model_dir: str, timeout_s: float = LOAD_TIMEOUT_S, **options: Any
    ) -> Lease:
        """Load a model that stays loaded while the lease is open and this process lives.

        options: `backend`, `precision`, `max_rows`, `base`, see `engine.http.server`
        """
        connection = UnixConnection(self._path, timeout_s)
        body = {"name": name, "model_dir": model_dir, "lease": True, **options}
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/models", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            content = response.read() if response.status >= 400 else response.readline()
            if not content:
                raise http.client.HTTPException("the engine closed the connection")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineUnavailable("the engine does not answer") from error
        if response.status >= 400:
            connection.close()
            raise error_of(response.status, content, response.headers.get("Retry-After"))
        return Lease(connection, response, json.loads(content))


class Lease:
    """A load's open response; `model` is the engine's description of the model."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        model: dict[str, Any],
    ) -> None:
        self._connection, self._response = connection, response
        self.model = model

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._response.close()
            self._connection.close()


class ModelHandle:
    """A worker's loaded model. Thread-safe."""

    def __init__(self, client: EngineClient, name: str, model_dir: str, **options: Any) -> None:
        """Load the model. Raises what the engine raises, and `EngineUnavailable`."""
        self._client, self._name, self._model_dir = client, name, model_dir
        self._options = options
        self._lock = threading.Lock()
        self._uses = Uses()
        self._lease = client.lease(name, model_dir, **options)

    @property
    def model(self) -> dict[str, Any]:
        return self._lease.model

    def generate(
        self,
        inputs: str | Mapping[str, str],
        parameters: Mapping[str, Any],
        timeout_s: float = 60.0,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Return the engine's answer, see `engine.http.answer.Answer.result`.

        If the engine has been restarted, the model is loaded again and the request sent once more.
        By `request_id` the gateway can cancel it (`AsyncEngineClient.cancel`). Raises the engine's
        errors, and `EngineUnavailable` if it does not come back.
        """
        body = {"inputs": inputs, "parameters": parameters}
        return self._call("generate", body, timeout_s, request_id)

    def classify(
        self,
        texts: Sequence[Sequence[str]],
        timeout_s: float = 60.0,
        request_id: str | None = None,
        *,
        first: int | None = None,
        truncate: bool = False,
    ) -> dict[str, Any]:
        """Return the engine's answer, see `classify` in `engine.http.server`; as `generate`."""
        body = {"inputs": texts, "first": first, "truncate": truncate}
        return self._call("classify", body, timeout_s, request_id)

    def _call(
        self, method: str, body: Mapping[str, Any], timeout_s: float, request_id: str | None
    ) -> dict[str, Any]:
        lease = self._lease
        deadline = time.monotonic() + timeout_s
        if request_id:
            body = {**body, "request_id": request_id}
        try:
            return self._send(method, body, timeout_s)
        except (EngineUnavailable, ModelNotFound):
            if time.monotonic() >= deadline:
                raise
        self._renew(lease, min(deadline, time.monotonic() + RECONNECT_S))
        return self._send(method, body, max(deadline - time.monotonic(), 0.1))

    def _send(self, method: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        body = {**body, "timeout_s": timeout_s}
        url = f"/models/{quote(self._name, safe='')}/{method}"
        limit_s = timeout_s + GRACE_S
        answer: dict[str, Any] = self._client.request("POST", url, body, limit_s, self._uses)
        return answer

    def _renew(self, old: Lease, deadline: float) -> None:
        """Load the model again, once for all threads that lost it."""
        with self._lock:
            if self._uses.ended:
                raise ModelNotFound("the model is not loaded")
            if self._lease is not old:
                return
            while True:
                try:
                    remaining_s = max(deadline - time.monotonic(), 0.1)
                    lease = self._client.lease(
                        self._name, self._model_dir, **self._options, timeout_s=remaining_s
                    )
                    break
                except EngineUnavailable:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.1)
            self._lease.close()
            self._lease = lease

    def close(self) -> None:
        """Close the lease and abort the requests of the model."""
        self._uses.end()
        with self._lock:
            self._lease.close()
