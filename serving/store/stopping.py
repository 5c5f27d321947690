"""Stops store requests that take too long, by shutting down their connections.

requests and boto3 limit only the time between two bytes: a store that sends a byte every few
seconds would block a thread for ever.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection


class Stop(threading.Event):
    """An event whose `set` shuts down the connections of threads that are inside `covers`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_for: Path | None = None  # the lock of another process that fetches the model
        self._connections: dict[int, socket.socket] = {}  # by thread
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def covers(self) -> Iterator[None]:
        """Let `set` stop the requests that the calling thread makes inside the context."""
        _here.stops.append(self)
        try:
            yield
        finally:
            _here.stops.remove(self)
            with self._guard:
                self._connections.pop(threading.get_ident(), None)

    def set(self) -> None:
        super().set()
        with self._guard:
            for connection in self._connections.values():
                _shut_down(connection)

    def waits_on(self, connection: socket.socket) -> None:
        """Register the connection on which the calling thread waits."""
        with self._guard:
            self._connections[threading.get_ident()] = connection
            if self.is_set():
                _shut_down(connection)


class _Here(threading.local):
    def __init__(self) -> None:
        self.stops: list[Stop] = []


_here = _Here()


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Stoppable:
    """A mixin of `HTTPConnection` that registers its socket with the thread's `Stop`s."""

    sock: socket.socket

    def getresponse(self) -> Any:
        for stop in _here.stops:
            stop.waits_on(self.sock)
        return super().getresponse()  # type: ignore[misc]


class _HTTP(Stoppable, HTTPConnection): ...


class _HTTPS(Stoppable, HTTPSConnection): ...


class _HTTPPool(HTTPConnectionPool):
    ConnectionCls = _HTTP


class _HTTPSPool(HTTPSConnectionPool):
    ConnectionCls = _HTTPS


class StoppableAdapter(HTTPAdapter):
    """An adapter for requests' `Session` whose connections are `Stoppable`."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*arguments, **options)
        manager.pool_classes_by_scheme = self.poolmanager.pool_classes_by_scheme
        return manager
