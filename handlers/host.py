"""The host: one worker process for all models that the engine holds.

The handler of such a model only forwards requests to the engine. For each model Multi Model Server
starts an owner (`handlers/mms_home`), which sends the model's listening socket to the host and then
waits as a shell. The model is unloaded when its owner ends. If the host ends, the owners send their
sockets to the next host, and MMS reconnects.

One pool of threads reads the messages of all models: a thread per request in flight.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.logs import log_as_json
from common.oom import SERVER, expendable
from common.open_files import raise_open_files_limit
from handlers.mms_connection import Connection, Connections, LoadedModel, accept_failed, listen
from handlers.user_code.confinement.rules import unenforced

# Each request in flight and each load takes a thread; further messages wait.
MAX_THREADS = 512
# Idle threads (16 KiB each), started with the process: they serve requests where RLIMIT_NPROC or a
# pids limit allows no more. Further threads end after their request.
MAX_IDLE_THREADS = 32
# With fewer idle threads, more are started. Two, so that one still reads messages while the start
# of another fails; that is retried with the next message or after POLL_INTERVAL_S.
MIN_IDLE_THREADS = 2
POLL_INTERVAL_S = 0.5  # also the delay until a model that MMS has unregistered is unloaded
# How long to wait for an owner's socket. The connection is then closed, and the owner retries.
OWNER_TIMEOUT_S = 1.0
UNREGISTERED = b".\n"  # a line, which the owner's shell reads

logger = logging.getLogger(__name__)


class Poller:
    """Waits for readable sockets; each is read by one thread at a time."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], bool]] = {}

    def add(self, source: socket.socket, read: Callable[[], bool]) -> None:
        """Calls `read` whenever `source` is readable, until `read` returns False."""
        self._readers[source.fileno()] = read
        self._epoll.register(source, select.EPOLLIN | select.EPOLLONESHOT)

    def discard(self, source: socket.socket) -> None:
        """Stops polling `source`; call this before closing it."""
        with contextlib.suppress(OSError, ValueError):
            self._readers.pop(source.fileno(), None)
            self._epoll.unregister(source)

    def read_next(self, on_readable: Callable[[], None]) -> None:
        """Waits for a readable socket, calls `on_readable`, then reads the socket."""
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


@dataclass(eq=False)
class HostedModel:
    owner: socket.socket
    listener: socket.socket
    loaded: LoadedModel = field(default_factory=LoadedModel)
    connections: Connections = field(default_factory=Connections)


class Host:
    """Serves the models whose owners connect to `listener`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._poller = listener, Poller()
        self._models: set[HostedModel] = set()
        self._lock = threading.Lock()
        self._threads = self._idle = 0
        self._thread_error_logged = False

    def serve(self) -> None:
        """Accepts owners forever; closes connections that send no socket, such as health checks."""
        with self._lock:
            self._start_threads(MAX_IDLE_THREADS)
        self._listener.settimeout(POLL_INTERVAL_S)
        while True:
            try:
                self._accept_owner(self._listener.accept()[0])
            except TimeoutError:
                pass
            except OSError as error:
                accept_failed("a model's owner", error)
            with self._lock:
                self._start_threads(MIN_IDLE_THREADS)
                abandoned = [model for model in self._models if model.connections.have_ended()]
            for model in abandoned:  # the owner exits, and `_drop` then unloads the model
                with contextlib.suppress(OSError):
                    model.owner.send(UNREGISTERED)

    # Threads

    def _start_threads(self, least_idle: int) -> None:
        """Starts threads until `least_idle` are idle, or the system refuses one. Needs the lock."""
        while self._idle < least_idle and self._threads < MAX_THREADS:
            try:
                threading.Thread(target=self._run, daemon=True).start()
            except RuntimeError as error:
                if not self._thread_error_logged:
                    self._thread_error_logged = True
                    logger.error(
                        "%s: at most %d requests are answered at once; raise RLIMIT_NPROC or the"
                        " container's pids limit",
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
        """Counts this thread as busy, and starts others if too few wait for the next message."""
        with self._lock:
            self._idle -= 1
            self._start_threads(MIN_IDLE_THREADS)

    # Models

    def _accept_owner(self, owner: socket.socket) -> None:
        owner.settimeout(OWNER_TIMEOUT_S)
        with contextlib.suppress(OSError, LookupError):
            _, files, _, _ = socket.recv_fds(owner, 1, 1)
            listener = socket.socket(fileno=files[0])
            listener.setblocking(False)
            model = HostedModel(owner, listener)
            with self._lock:
                self._models.add(model)
            # Add the owner last: if it has ended already, its event closes both sockets at once.
            self._poller.add(listener, lambda: self._connect(model))
            self._poller.add(owner, lambda: self._drop(model))
            return
        owner.close()

    def _connect(self, model: HostedModel) -> bool:
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
            model.connections.add(connection)
        self._poller.add(accepted, lambda: self._answer(model, connection))
        return True

    def _answer(self, model: HostedModel, connection: Connection) -> bool:
        try:
            if connection.answer():
                return True
        except OSError:
            pass
        except Exception:
            logger.exception("a connection of Multi Model Server ended")
        self._poller.discard(connection.socket)
        with self._lock:
            model.connections.discard(connection)
        connection.close()
        return False

    def _drop(self, model: HostedModel) -> bool:
        """Unloads a model and closes its sockets; connections end after their current message.

        Returns False, so that the poller stops polling the owner.
        """
        with self._lock:
            if model not in self._models:
                return False
            self._models.remove(model)
            connections = list(model.connections.open)
        for source in (model.owner, model.listener):
            self._poller.discard(source)
            source.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
        model.loaded.close()
        return False


def main() -> None:
    log_as_json("worker")
    raise_open_files_limit()
    expendable(SERVER)
    for clause in unenforced():
        logger.warning("models' scripts and graphs are not isolated on this machine: %s", clause)
    Host(listen(Path(os.environ["RUN_DIR"]) / "workers.sock")).serve()


if __name__ == "__main__":
    main()
