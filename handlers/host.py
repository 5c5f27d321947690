"""One process that answers for all models that the engine holds.

The handler for such a model only passes requests on to the engine, so one process serves any
number of them: a further model costs some objects here, and the process that Multi Model Server
starts for it, a shell that owns its socket (`handlers/mms_home`). It hands that socket over here,
and the model lives until it ends. Where this process ends instead, the next one gets the sockets,
and MMS connects again.

Whoever is free takes the next message, of whichever model: as many threads as there are requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.lazy_imports import lazily_imported
from common.logs import log_as_json
from common.oom import SERVER, expendable
from handlers.mms_connection import Connection, LoadedModel
from handlers.user_code.confinement.rules import missing
from handlers.worker import CONNECTIONS_AT_ONCE, LEFT_ALONE_S, NEVER_CONNECTED_S

# Each request in flight has one, and so has each load.
MAX_THREADS = 512
# Idle ones, from the start: they answer where no more can be had (RLIMIT_NPROC, a pids limit). More
# end once they have answered, such as those of the connections that all come after a restart.
SPARE_THREADS = 32  # 16 KiB each
# With fewer idle ones more are started: until one that does not start is tried again, at the next
# message or after LOOK_AROUND_S, another waits for messages.
MIN_IDLE_THREADS = 2
LOOK_AROUND_S = 0.5
# An owner that is late with its socket, such as one that was stopped, comes again.
INTRODUCTION_S = 1.0
LEAVE = b".\n"  # a line, which a shell reads

logger = logging.getLogger(__name__)


class Sources:
    """Sockets to read from, each by one thread at a time."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], bool]] = {}

    def add(self, source: socket.socket, read: Callable[[], bool]) -> None:
        """`read` is called when there is something; as long as it says so, again and again."""
        self._ready[source.fileno()] = read
        self._epoll.register(source, select.EPOLLIN | select.EPOLLONESHOT)

    def discard(self, source: socket.socket) -> None:
        """Before it is closed."""
        with contextlib.suppress(OSError, ValueError):
            self._ready.pop(source.fileno(), None)
            self._epoll.unregister(source)

    def serve_one(self, taken: Callable[[], None]) -> None:
        for number, _ in self._epoll.poll(maxevents=1):
            again = True
            try:
                taken()
                read = self._ready.get(number)
                again = read is not None and read()
            finally:  # nobody else would come back to one whose reading has failed
                if again:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        self._epoll.modify(number, select.EPOLLIN | select.EPOLLONESHOT)


class HostedModel:
    """One model's socket, connections and handler."""

    def __init__(self, owner: socket.socket, listener: socket.socket) -> None:
        self.owner, self.listener = owner, listener
        self.loaded = LoadedModel()
        self.connections: set[socket.socket] = set()
        self.alone_since = time.monotonic()
        self.had_connections = False

    def is_left_alone(self) -> bool:
        limit_s = LEFT_ALONE_S if self.had_connections else NEVER_CONNECTED_S
        return not self.connections and time.monotonic() - self.alone_since > limit_s


class Host:
    """Serves what comes through `listener`: models, each by the process that MMS started for it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._sources = listener, Sources()
        self._models: set[HostedModel] = set()
        self._lock = threading.Lock()
        self._threads = self._idle = 0
        self._too_few_threads = False

    def serve(self) -> None:
        """Never returns. Owners are met here, however many requests there are; who connects and
        brings no socket is hung up on, and knows that this process works."""
        with self._lock:
            self._start_threads(SPARE_THREADS)
        self._listener.settimeout(LOOK_AROUND_S)
        while True:
            with contextlib.suppress(TimeoutError):
                self._meet_owner(self._listener.accept()[0])
            with self._lock:
                self._start_threads(MIN_IDLE_THREADS)
                left = [model for model in self._models if model.is_left_alone()]
            for model in left:  # MMS has unregistered it, or is gone; with its owner it ends
                with contextlib.suppress(OSError):
                    model.owner.send(LEAVE)

    # Threads

    def _start_threads(self, least_idle: int) -> None:
        """Starts threads until so many are idle, as far as the system lets it. With the lock."""
        while self._idle < least_idle and self._threads < MAX_THREADS:
            try:
                threading.Thread(target=self._run, daemon=True).start()
            except RuntimeError as error:
                if not self._too_few_threads:
                    self._too_few_threads = True
                    logger.error(
                        "%s: at most %d requests are answered at once, because of RLIMIT_NPROC or"
                        " the container's limit of pids",
                        error,
                        self._threads,
                    )
                return
            self._threads += 1
            self._idle += 1
        self._too_few_threads = False

    def _run(self) -> None:
        while True:
            try:
                self._sources.serve_one(self._taken)
            except Exception:
                logger.exception("a message of Multi Model Server was not answered")
            with self._lock:
                if self._idle >= SPARE_THREADS:
                    self._threads -= 1
                    return
                self._idle += 1

    def _taken(self) -> None:
        """This thread has something to do; another one waits for what comes next."""
        with self._lock:
            self._idle -= 1
            self._start_threads(MIN_IDLE_THREADS)

    # Models

    def _meet_owner(self, owner: socket.socket) -> None:
        owner.settimeout(INTRODUCTION_S)
        with contextlib.suppress(OSError, LookupError):
            _, files, _, _ = socket.recv_fds(owner, 1, 1)
            listener = socket.socket(fileno=files[0])
            listener.setblocking(False)
            model = HostedModel(owner, listener)
            with self._lock:
                self._models.add(model)
            # The owner last: from then on its end closes both, at once if it has ended already.
            self._sources.add(listener, lambda: self._connect(model))
            self._sources.add(owner, lambda: self._owner_ended(model))
            return
        owner.close()

    def _owner_ended(self, model: HostedModel) -> bool:
        self._drop(model)
        return False

    def _connect(self, model: HostedModel) -> bool:
        try:
            accepted, _ = model.listener.accept()
        except BlockingIOError:  # whoever it was has hung up
            return True
        except OSError:  # it was dropped
            return False
        accepted.setblocking(True)
        connection = Connection(accepted, model.loaded)
        with self._lock:
            if model not in self._models:
                accepted.close()
                return False
            model.connections.add(accepted)
            model.had_connections = True
        self._sources.add(accepted, lambda: self._answer(model, connection))
        return True

    def _answer(self, model: HostedModel, connection: Connection) -> bool:
        try:
            if connection.answer():
                return True
        except OSError:
            pass
        except Exception:
            logger.exception("a connection of Multi Model Server ended")
        self._sources.discard(connection.socket)
        with self._lock:
            model.connections.discard(connection.socket)
            model.alone_since = time.monotonic()
        connection.close()
        return False

    def _drop(self, model: HostedModel) -> None:
        """Closes everything of a model. Its connections end with the message they are at."""
        with self._lock:
            if model not in self._models:
                return
            self._models.remove(model)
            connections = list(model.connections)
        for source in (model.owner, model.listener):
            self._sources.discard(source)
            source.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        model.loaded.close()


def main() -> None:
    log_as_json("worker")
    expendable(SERVER)
    for lack in missing():
        logger.warning("models' scripts and graphs are not kept apart on this machine: %s", lack)
    path = Path(os.environ["RUN_DIR"]) / "workers.sock"
    path.unlink(missing_ok=True)
    with lazily_imported("numpy", "scipy", "scipy.sparse"):
        import sagemaker_inference.default_handler_service  # noqa: F401
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(CONNECTIONS_AT_ONCE)
    Host(listener).serve()


if __name__ == "__main__":
    main()
