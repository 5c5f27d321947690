"""One model's worker process: a thread per connection of Multi Model Server.

For a model's own script, whose process for each connection is below this one (handlers.user_code),
and for a model of tensors, which this one computes, confined like a script; `handlers.host` answers
for the engine's models.

MMS's own worker (mms/model_service_worker.py, 1.1.11) forks a process per connection, each with its
own numpy and scipy: 39 MB, where one process with threads takes 22 MB however many connections it
has. The protocol and the service are MMS's own.

The process that MMS starts only watches a fork of itself that does the work: MMS connects again to
a worker that crashed, but never starts that first process again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from common.lazy_imports import lazily_imported
from common.oom import WORKER, expendable
from common.settings import read_settings
from handlers.dispatch import computes_tensors
from handlers.mms_connection import Connection, LoadedModel
from handlers.model_spec import ModelSpec
from handlers.settings import Settings
from handlers.user_code.confinement.rules import Confinement, OwnUser
from handlers.user_code.output import print_anything

# The worker goes when MMS has closed all connections for this long: the model was unregistered, or
# MMS itself is gone.
LEFT_ALONE_S = 5.0
# MMS connects as soon as a worker has started, and to one that crashed within its back-off.
NEVER_CONNECTED_S = 120.0
CONNECTIONS_AT_ONCE = 128

LOOK_AROUND_S = 0.25
RESTART_S = 0.2

PR_SET_PDEATHSIG = 1


class Worker:
    """Loads one model once and answers on each connection with a context of its own."""

    def __init__(self, socket_path: str, parent: int) -> None:
        self._socket_path, self._model = Path(socket_path), LoadedModel()
        self._lock = threading.Lock()
        self._connections = 0
        self._alone_since = time.monotonic()
        self._had_connections = False
        self._parent = parent

    def serve(self, listener: socket.socket) -> None:
        """Never returns: ends the process when MMS has left it."""
        listener.settimeout(LOOK_AROUND_S)
        while not self._left_alone():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.setblocking(True)
            with self._lock:
                self._connections += 1
                self._had_connections = True
            self._start_thread(Connection(connection, self._model))
        self._leave()

    def _start_thread(self, connection: Connection) -> None:
        """Until it starts: where the system refuses a thread, the connection waits for it."""
        while True:
            with contextlib.suppress(RuntimeError):
                target, arguments = self._serve_connection, (connection,)
                return threading.Thread(target=target, args=arguments, daemon=True).start()
            logging.error("can't start new thread: RLIMIT_NPROC or the container's limit of pids")
            time.sleep(LOOK_AROUND_S)

    def _left_alone(self) -> bool:
        orphaned = os.getppid() != self._parent
        with self._lock:
            limit_s = LEFT_ALONE_S if self._had_connections else NEVER_CONNECTED_S
            alone = orphaned or time.monotonic() - self._alone_since > limit_s
            return alone and not self._connections

    def _serve_connection(self, connection: Connection) -> None:
        try:
            while connection.answer():
                pass
        except Exception:
            logging.exception("a connection of Multi Model Server ended")
        finally:
            connection.close()
            with self._lock:
                self._connections -= 1
                self._alone_since = time.monotonic()

    def _leave(self) -> None:
        """Ends the process at once, not held up by a request that never ends."""
        with contextlib.suppress(OSError):  # a confined one leaves that to its parent
            self._socket_path.unlink(missing_ok=True)
        sys.stdout.flush()
        os._exit(0)


def confine(spec: ModelSpec) -> None:
    """Confines this process like a script's, if its model is one of tensors: their libraries parse
    and run in C++ what anybody wrote. Before it has threads. Raises `OSError`."""
    isolated = read_settings(Settings).script_isolation
    if not isolated or not computes_tensors(spec.path, spec.handler):
        return
    inside = Path(spec.path).rglob("*")
    linked = [str(path.resolve()) for path in inside if path.is_symlink()]  # within the store
    user = OwnUser(os.environ.get("RUN_DIR", spec.folder))
    read = [spec.folder, spec.path, *linked]
    Confinement(read=read, write=[], network=False, uid=user.uid).enter()


def main() -> None:
    print_anything()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    from mms.arg_parser import ArgParser

    arguments = ArgParser.model_service_worker_args().parse_args()
    path = Path(arguments.sock_name)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(CONNECTIONS_AT_ONCE)
    expendable(WORKER)
    # MMS waits for these two lines. A process that ends before them stops all its loads for two
    # minutes; one that ends after them is noticed at once. So they come before the slow imports.
    print(f"[PID] {os.getpid()}", flush=True)
    print("MMS worker started.", flush=True)
    with lazily_imported("numpy", "scipy", "scipy.sparse"):
        import sagemaker_inference.default_handler_service  # noqa: F401
    watcher = os.getpid()
    while True:
        try:
            child = os.fork()
        except OSError as error:
            logging.error("the worker of %s does not start: %s", path.name, error.strerror)
            time.sleep(RESTART_S)
            continue
        if child == 0:
            confine(ModelSpec.read(Path(arguments.model_path), arguments.model_name))
            # Its watcher's end is its own, also where a connection stays open for ever.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            Worker(arguments.sock_name, watcher).serve(listener)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            path.unlink(missing_ok=True)
            sys.exit(0)
        logging.error("the worker of %s ended with %d; it is started again", path.name, status)
        time.sleep(RESTART_S)


if __name__ == "__main__":
    main()
