"""Serves models on Multi Model Server's connections, with one pool of threads for all of them.

The pool reads the messages of all connections: a thread per request in flight.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from handlers.mms_connection import Connection, LoadedModel

# Each request in flight and each load takes a thread; further messages wait.
MAX_THREADS = 512
# Idle threads (16 KiB each). Further threads end after their request.
MAX_IDLE_THREADS = 32
# With fewer idle threads, more are started. Two, so that one still reads messages while the start
# of another fails; that is retried with the next message or `maintain`.
MIN_IDLE_THREADS = 2
# A model ends when MMS has had no connection to it for this long: it has unregistered the model or
# has ended. A smaller value ends models to which MMS only reconnects.
DISCONNECTED_TIMEOUT_S = 5.0
# The timeout before the first connection. It must exceed MMS's back-off after a crash.
FIRST_CONNECTION_TIMEOUT_S = 120.0
LISTEN_BACKLOG = 128
ACCEPT_RETRY_S = 0.25

logger = logging.getLogger(__name__)


def listen(path: Path) -> socket.socket:
    """Listen on the unix socket `path`."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(LISTEN_BACKLOG)
    return listener


def accept_failed(what: str, error: OSError) -> None:
    """Log why `accept` failed, such as EMFILE, and wait: the connection is in the backlog."""
    logger.error("%s waits: %s; raise RLIMIT_NOFILE", what, error.strerror)
    time.sleep(ACCEPT_RETRY_S)


class Poller:
    """Waits for readable sockets; each is read by one thread at a time."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], bool]] = {}

    def add(self, source: socket.socket, read: Callable[[], bool]) -> None:
        """Call `read` whenever `source` is readable, until `read` returns False."""
        self._readers[source.fileno()] = read
        self._epoll.register(source, select.EPOLLIN | select.EPOLLONESHOT)

    def discard(self, source: socket.socket) -> None:
        """Stop polling `source`; call this before closing it."""
        with contextlib.suppress(OSError, ValueError):
            self._readers.pop(source.fileno(), None)
            self._epoll.unregister(source)

    def read_next(self, on_readable: Callable[[], None]) -> None:
        """Wait for a readable socket, call `on_readable`, then read the socket."""
        for descriptor, _ in self._epoll.poll(maxevents=1):
            again = True
            try:
                on_readable()
                read = self._readers.get(descriptor)
                again = read is not None and read()
            finally:  # even after an error: an unarmed socket would never be read again
                if again:
                    with contextlib.suppress(OSError):  # already closed
                        self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLONESHOT)


class ServedModel:
    """A model, the socket on which MMS connects to it, and the open connections."""

    def __init__(
        self,
        listener: socket.socket,
        loaded: LoadedModel | None = None,
        owner: socket.socket | None = None,
    ) -> None:
        """The model is dropped when the connection `owner` is readable or closed."""
        self.listener, self.owner = listener, owner
        self.loaded = loaded or LoadedModel()
        self.connections: set[Connection] = set()
        self._idle_since, self._timeout_s = time.monotonic(), FIRST_CONNECTION_TIMEOUT_S

    def add(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._timeout_s = DISCONNECTED_TIMEOUT_S

    def discard(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._idle_since = time.monotonic()

    @property
    def is_abandoned(self) -> bool:
        """Whether MMS has unregistered the model or ended: no connection for the timeout."""
        return not self.connections and time.monotonic() - self._idle_since > self._timeout_s


class Server:
    """Answers the requests for models. Thread-safe."""

    def __init__(self) -> None:
        self._poller = Poller()
        self._models: set[ServedModel] = set()
        self._lock = threading.RLock()
        self._threads = self._idle = 0
        self._thread_error_logged = False

    # Threads

    def start_threads(self, least_idle: int = MIN_IDLE_THREADS) -> None:
        """Start threads until `least_idle` are idle, or the system refuses one."""
        with self._lock:
            while self._idle < least_idle and self._threads < MAX_THREADS:
                try:
                    threading.Thread(target=self._run, daemon=True).start()
                except RuntimeError as error:
                    if not self._thread_error_logged:
                        self._thread_error_logged = True
                        logger.error(
                            "%s: at most %d requests are answered at once; raise RLIMIT_NPROC or"
                            " the container's pids limit",
                            error,
                            self._threads,
                        )
                    return
                self._threads += 1
                self._idle += 1
            self._thread_error_logged = False

    def _run(self) -> None:
        while True:
            try:
                self._poller.read_next(self._on_readable)
            except Exception:
                logger.exception("a message of Multi Model Server was not answered")
            with self._lock:
                if self._idle >= MAX_IDLE_THREADS:
                    self._threads -= 1
                    return
                self._idle += 1

    def _on_readable(self) -> None:
        """Count this thread as busy, and start others if too few wait for the next message."""
        with self._lock:
            self._idle -= 1
            self.start_threads()

    # Models

    def add(self, model: ServedModel) -> None:
        """Accept connections to a model and answer them, until `owner` ends."""
        model.listener.setblocking(False)
        with self._lock:
            self._models.add(model)
        # Add the owner last: if it has ended already, its event closes both sockets at once.
        self._poller.add(model.listener, lambda: self._connect(model))
        if model.owner is not None:
            self._poller.add(model.owner, lambda: self._drop(model))

    def maintain(self) -> list[ServedModel]:
        """Start threads that were refused before, and list the models that MMS has unregistered.

        Call this periodically: without a message nothing else starts threads.
        """
        with self._lock:
            self.start_threads()
            return [model for model in self._models if model.is_abandoned]

    def _connect(self, model: ServedModel) -> bool:
        try:
            accepted, _ = model.listener.accept()
        except BlockingIOError:  # the client has disconnected
            return True
        except OSError as error:
            with self._lock:
                if model not in self._models:  # `_drop` has closed the listener
                    return False
            accept_failed("a connection of Multi Model Server", error)
            return True
        accepted.setblocking(True)
        connection = Connection(accepted, model.loaded)
        with self._lock:
            if model not in self._models:
                accepted.close()
                return False
            model.add(connection)
        self._poller.add(accepted, lambda: self._answer(model, connection))
        return True

    def _answer(self, model: ServedModel, connection: Connection) -> bool:
        try:
            if connection.answer():
                return True
        except OSError:
            pass
        except Exception:
            logger.exception("a connection of Multi Model Server ended")
        self._poller.discard(connection.socket)
        with self._lock:
            model.discard(connection)
        connection.close()
        return False

    def _drop(self, model: ServedModel) -> bool:
        """Unload a model and close its sockets; connections end after their current message.

        Returns False, so that the poller stops polling the owner.
        """
        with self._lock:
            if model not in self._models:
                return False
            self._models.remove(model)
            connections = list(model.connections)
        for source in (model.owner, model.listener):
            if source is not None:
                self._poller.discard(source)
                source.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        model.loaded.close()
        return False
