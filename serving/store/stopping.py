"""Ends what a store does not answer in time.

requests and boto3 limit the wait for the next byte only: a store that sends one every few seconds
holds a thread for as long as it likes. Here the connection that a thread waits on is known, and is
shut down when the thread's work is given up.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection


class Stop(threading.Event):
    """Set when work is given up: shuts down the connections of the threads that do it."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: dict[int, socket.socket] = {}  # by thread
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def covers(self) -> Iterator[None]:
        """What the calling thread does inside is this work."""
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
    """Of an `HTTPConnection`: it can be shut down while an answer is waited for."""

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
    """For a session of requests."""

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*arguments, **options)
        manager.pool_classes_by_scheme = self.poolmanager.pool_classes_by_scheme
        return manager
