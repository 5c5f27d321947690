"""The worker process of one model, for any number of connections of Multi Model Server.

It serves models with their own script, which runs in child processes (handlers.user_code), and
models of tensors, which it computes itself, confined like a script. `handlers.host` serves the
engine's models.

MMS's own worker (mms/model_service_worker.py, 1.1.11) forks a process of 39 MB per connection, with
its own numpy and scipy. This process takes 22 MB for any number of connections. The protocol and
the service are MMS's.

The process that MMS starts is a watcher: it forks the process that serves, and again if that
crashes. MMS reconnects to a crashed worker, but does not start its process again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from pathlib import Path

from common.errors import EngineError, Overloaded
from common.oom import WORKER, expendable
from common.parent_death import end_with_parent
from common.settings import read_settings
from handlers.dispatch import computes_tensors
from handlers.mms_connection import LoadedModel
from handlers.mms_server import ServedModel, Server, listen
from handlers.model_spec import ModelSpec
from handlers.settings import Settings
from handlers.user_code.confinement.rules import Confinement, allocate_user
from handlers.user_code.output import print_anything

POLL_INTERVAL_S = 0.25
RESTART_BACK_OFF_S = 0.2


def serve(listener: socket.socket, path: Path, watcher: int, model: LoadedModel) -> None:
    """Answer until MMS has abandoned the model or the watcher has ended; then end the process."""
    server = Server()
    server.add(ServedModel(listener, model))
    while not server.maintain() and os.getppid() == watcher:
        time.sleep(POLL_INTERVAL_S)
    # Exit immediately, even with a request in flight.
    with contextlib.suppress(OSError):  # a confined process may not; the watcher does
        path.unlink(missing_ok=True)
    sys.stdout.flush()
    os._exit(0)


def confinement_of(spec: ModelSpec) -> Confinement | None:
    """Return the limits of a process that computes tensors; None for other models.

    Reserves a user until this process and its children end. Raises `Overloaded` if none is free.
    """
    isolated = read_settings(Settings).script_isolation
    if not isolated or not computes_tensors(spec.path, spec.handler):
        return None
    files = Path(spec.path).rglob("*")
    targets = [str(path.resolve()) for path in files if path.is_symlink()]  # within the store
    uid = allocate_user(os.environ.get("RUN_DIR", spec.folder))
    return Confinement(read=[spec.folder, spec.path, *targets], write=[], network=False, uid=uid)


def not_confined(error: OSError) -> EngineError:
    return EngineError(
        f"the model's process cannot be confined: {error.strerror}; allow Landlock and seccomp in"
        " the container, or turn them off by SCRIPT_ISOLATION=false"
    )


def refused(error: EngineError) -> LoadedModel:
    """Return a model that answers with `error`; nothing of it is read."""
    from handlers.handler_service import HandlerService

    service = HandlerService()
    service.load_error = error
    return LoadedModel(service.handle)


def main() -> None:
    print_anything()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    from mms.arg_parser import ArgParser

    arguments = ArgParser.model_service_worker_args().parse_args()
    path = Path(arguments.sock_name)
    listener = listen(path)
    expendable(WORKER)
    # MMS waits up to two minutes for these two lines and delays all its loads meanwhile, even if
    # the process has ended. After them it detects an end at once: print them before slow imports.
    print(f"[PID] {os.getpid()}", flush=True)
    print("MMS worker started.", flush=True)
    watcher, confinement = os.getpid(), None
    refusal: EngineError | None = None
    spec = ModelSpec.read(Path(arguments.model_path), arguments.model_name)
    try:  # here, so that a process that is forked again has the same user
        confinement = confinement_of(spec)
    except Overloaded as error:
        refusal = error
    except OSError as error:
        refusal = not_confined(error)
    while True:
        try:
            child = os.fork()
        except OSError as error:
            logging.error("the worker of %s does not start: %s", path.name, error.strerror)
            time.sleep(RESTART_BACK_OFF_S)
            continue
        if child == 0:
            try:
                if confinement is not None:
                    confinement.enter()  # before threads start
            except OSError as error:  # the load fails, and MMS unregisters the model
                refusal = not_confined(error)
            # Kill this process when its watcher ends, even while a connection is open.
            end_with_parent(watcher)
            model = LoadedModel() if refusal is None else refused(refusal)
            serve(listener, path, watcher, model)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            path.unlink(missing_ok=True)
            sys.exit(0)
        logging.error("the worker of %s ended with %d; it is started again", path.name, status)
        time.sleep(RESTART_BACK_OFF_S)


if __name__ == "__main__":
    main()
