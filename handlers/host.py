"""The host: one worker process for all models that the engine holds.

The handler of such a model only forwards requests to the engine. For each model Multi Model Server
starts an owner (`handlers/mms_home`), which sends the model's listening socket to the host and then
waits as a shell. The model is unloaded when its owner ends. If the host ends, the owners send their
sockets to the next host, and MMS reconnects.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

from common.logs import log_as_json
from common.oom import SERVER, expendable
from common.open_files import raise_open_files_limit
from common.parent_death import end_with_server
from handlers.mms_server import MAX_IDLE_THREADS, ServedModel, Server, accept_failed, listen
from handlers.user_code.confinement.rules import unenforced

POLL_INTERVAL_S = 0.5  # also the delay until a model that MMS has unregistered is unloaded
# How long to wait for an owner's socket. The connection is then closed, and the owner retries.
OWNER_TIMEOUT_S = 1.0
UNREGISTERED = b".\n"  # a line, which the owner's shell reads

logger = logging.getLogger(__name__)


def serve(listener: socket.socket) -> None:
    """Serve the models whose owners connect to `listener`, forever.

    Closes connections that send no socket, such as health checks.
    """
    server = Server()
    # Started with the process: where RLIMIT_NPROC or a pids limit allows no more, they answer.
    server.start_threads(MAX_IDLE_THREADS)
    listener.settimeout(POLL_INTERVAL_S)
    while True:
        try:
            accept_owner(listener.accept()[0], server)
        except TimeoutError:
            pass
        except OSError as error:
            accept_failed("a model's owner", error)
        for model in server.maintain():  # the owner exits, and the server then unloads the model
            if model.owner is not None:
                with contextlib.suppress(OSError):
                    model.owner.send(UNREGISTERED)


def accept_owner(owner: socket.socket, server: Server) -> None:
    owner.settimeout(OWNER_TIMEOUT_S)
    with contextlib.suppress(OSError, LookupError):
        _, files, _, _ = socket.recv_fds(owner, 1, 1)
        server.add(ServedModel(socket.socket(fileno=files[0]), owner=owner))
        return
    owner.close()


def main() -> None:
    end_with_server()
    log_as_json("worker")
    raise_open_files_limit()
    expendable(SERVER)
    for clause in unenforced():
        logger.warning("models' scripts and graphs are not isolated on this machine: %s", clause)
    serve(listen(Path(os.environ["RUN_DIR"]) / "workers.sock"))


if __name__ == "__main__":
    main()
