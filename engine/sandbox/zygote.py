"""`python -m engine.sandbox.zygote`: forks the children of `engine.sandbox` and sets their limits.

This process has one thread and imports what the children need before it forks them. It ends with
the engine, even if that crashes, and its children end with it. A child with `Limits.forks` does
the same work for children that need more than imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import logging
import os
import resource
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from common import landlock, seccomp
from common.errors import EngineError
from common.logs import log_as_json
from common.memory import MIB
from common.oom import SCRIPT, expendable
from engine.sandbox.messages import receive, send

PRELOADED = (
    *("numpy", "ml_dtypes", "blake3", "sentencepiece", "tokenizers", "zipfile", "pickletools"),
    *("engine.text.child", "engine.text.hugging_face"),
)
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
MAX_ORDERS_BYTES = 64 * MIB
OPEN_FILES = 256

logger = logging.getLogger(__name__)


def main() -> None:
    log_as_json("engine")
    control = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a stopping engine still uses sandboxes
    for name in (*PRELOADED, *sys.argv[2:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    serve(control)


def serve(control: socket.socket) -> NoReturn:
    """Fork the children that the other end of `control` orders, until it is closed."""
    gc.collect()
    gc.freeze()  # the collector would write to pages that the children share
    children: dict[int, socket.socket] = {}  # each with the socket that its exit status goes to
    # Set up before the first fork: the end of a child has to wake `events.select` below.
    wake, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    events = selectors.PollSelector()  # epoll would add a descriptor to each child
    events.register(control, selectors.EVENT_READ)
    events.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.fileobj is control:
                _start_child(control, events, children, (wake, writer))
            elif key.fileobj == wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                _reap(events, children)
            elif children.get(key.data) is key.fileobj:  # the engine has closed its end
                events.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)  # the pid is not reused before `_reap`


def _start_child(
    control: socket.socket,
    events: selectors.PollSelector,
    children: dict[int, socket.socket],
    wakeups: tuple[int, int],
) -> None:
    """Fork a child and send its pid or an error. Exits if the engine has ended."""
    content, descriptors, _, _ = socket.recv_fds(control, 1, 2)
    if not content:
        os._exit(0)
    given = [socket.socket(fileno=fd) for fd in descriptors]
    orders = receive(control, MAX_ORDERS_BYTES)
    try:
        if len(given) != 2:  # the kernel drops those beyond this process's limit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        connection, status = given
        parent = os.getpid()
        pid = os.fork()
    except OSError as error:
        for each in given:
            each.close()
        send(control, {"error": error.strerror})
        return
    if pid == 0:
        for other in (control, status, *children.values()):
            other.close()
        for wakeup in wakeups:
            os.close(wakeup)
        _be_child(connection, orders, parent)
    connection.close()
    children[pid] = status
    events.register(status, selectors.EVENT_READ, pid)
    send(control, {"pid": pid})


def _reap(events: selectors.PollSelector, children: dict[int, socket.socket]) -> None:
    """Send the exit status of each child that has ended."""
    while children:
        pid, exit_status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as status, contextlib.suppress(OSError):
            with contextlib.suppress(KeyError):  # `main` has killed it
                events.unregister(status)
            status.send(str(os.waitstatus_to_exitcode(exit_status)).encode())


def _be_child(connection: socket.socket, orders: Any, parent: int) -> None:
    """Serve the calls of a forked child, then exit. Never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        module, _, name = orders["target"].partition(":")
        target = getattr(importlib.import_module(module), name)
        arguments = orders["arguments"]
        if orders["file"]:
            arguments.append(os.open(orders["file"], os.O_RDWR))
        limit(parent, **orders["limits"])
        value = _answer(connection, target, arguments, first=True)
        if value is not None and orders["limits"]["forks"]:
            serve(connection)
        while callable(value):
            _answer(connection, value, receive(connection, MAX_ORDERS_BYTES))
        status = 0
    except ConnectionError:  # the engine has closed the connection
        status = 0
    except BaseException:
        logger.exception("a sandbox could not do its work")
    finally:
        sys.stdout.flush()
        os._exit(status)


def _answer(
    connection: socket.socket, target: Any, arguments: list[Any], first: bool = False
) -> Any:
    """Call the target and send the result. Returns it, or None after an error."""
    value: Any = None
    try:
        value = target(*arguments)
        answer: dict[str, Any] = {"value": None if first and callable(value) else value}
    except EngineError as error:
        answer = {"error": {"type": error.type, "message": error.message}}
    except MemoryError:
        answer = {"error": {"type": "MemoryError", "message": "out of memory"}}
    except Exception as error:
        logger.exception("a sandbox's call failed")
        answer = {"error": {"type": type(error).__name__, "message": type(error).__name__}}
    send(connection, answer)
    return value


def limit(
    parent: int,
    memory_mib: int,
    cpu_s: int,
    answer_mib: int,
    niceness: int,
    forks: bool,
    aborts: bool,
) -> None:
    """Set the limits of this process, for good; see `engine.sandbox.Limits`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(0)
    expendable(SCRIPT)
    if niceness:
        os.nice(niceness)
    # Native libraries print to stderr when they abort, which is not JSON as the log is.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    if forks:  # what it forks could not take back a limit
        return
    for kind, most in (
        # Not RLIMIT_AS, which would count mapped weights.
        (resource.RLIMIT_DATA, _data_bytes() + memory_mib * MIB),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ):
        if most or kind == resource.RLIMIT_CORE:
            resource.setrlimit(kind, (most, most + (kind == resource.RLIMIT_CPU)))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if landlock.abi():  # hides other processes' memory
        with contextlib.suppress(OSError):  # a container may forbid a part of it
            landlock.restrict(read=["/"], write=[])
    if not seccomp.install(libc):
        logger.warning("the kernel takes no seccomp filter: sandboxes have their limits only")


def _data_bytes() -> int:
    """Return the bytes of private writable memory, as RLIMIT_DATA counts them."""
    status = Path("/proc/self/status").read_text()
    return next(int(s.split()[1]) for s in status.splitlines() if s.startswith("VmData")) * 1024


if __name__ == "__main__":
    main()
