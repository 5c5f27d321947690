"""Attempts of a confined program, for `test_rules`: `python -m ... FOLDER UID ABI`.

The first process is the server, its child a model's script. The server runs as user UID, with
Landlock limited to ABI. Prints each attempt's outcome as JSON: "" or the error's name.
"""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401  a user may not reach this Python's folder later on
import json
import multiprocessing.popen_fork
import multiprocessing.synchronize
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import landlock, seccomp
from common.landlock import call
from handlers.user_code.confinement.capabilities import permitted
from handlers.user_code.confinement.rules import Confinement, allocate_user, environment

MACHINE = platform.machine()
COLUMN = list(seccomp.ARCHITECTURES).index(MACHINE) if MACHINE in seccomp.ARCHITECTURES else 0
FOLDERS = ("모델", "다른 모델", "temporary")
CLONE_NEWUSER, PTRACE_SEIZE = 0x10000000, 0x4206


def main() -> None:
    folder, user, abi = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    landlock.abi = lambda: abi
    model, other, temporary = (folder / name for name in FOLDERS)
    for path in (model, other, temporary):
        path.mkdir(mode=0o700)
        (path / "weights").write_text("가중치", encoding="utf-8")
        os.chown(path, user, user)
        os.chown(path / "weights", user, user)
    os.chown(folder, user, user)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        call("prctl", 4, 1, 0, 0, 0)  # as after a program is executed
    uid = allocate_user(str(folder))
    if uid is not None:
        os.chown(temporary, uid, uid)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "mms.sock"))
    listener.listen()
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(str(folder / "log.sock"))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{folder.name}")
    abstract.listen()
    network = socket.create_server(("127.0.0.1", 0))
    server = os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for each in (listener, datagrams, abstract):
            each.close()
        os.environ.update(environment(str(temporary)))
        Confinement(read=[str(model)], write=[str(temporary)], uid=uid).enter()
        groups = attempts(folder, server, network.getsockname())
        tried = {
            what: outcome(function) for group in groups.values() for what, function in group.items()
        }
        tried["user"], tried["capabilities"] = str(uid or ""), str(sorted(permitted()))
        os.write(writer, json.dumps(tried).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        print(pipe.read())
    os.waitpid(child, 0)


def outcome(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return ""


def attempts(folder: Path, server: int, address: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """All attempts by what prevents them on the kernels that can. Makes none of them."""
    model, other, temporary = (folder / name for name in FOLDERS)
    weights = other / "weights"

    def pair(*kind: int) -> None:
        for each in socket.socketpair(*kind):
            each.close()

    def connect(address: str) -> None:
        socket.socket(socket.AF_UNIX).connect(address)

    def made(name: str, *arguments: int) -> None:
        call("syscall", seccomp.IPC[name][COLUMN], *map(ctypes.c_long, arguments))

    def half_of_a_pair(kind: int, name: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with ours, theirs:
            if kind == socket.SOCK_DGRAM:
                ours.sendto(b"x", str(folder / name))
            else:
                ours.connect(str(folder / name))

    def cloned(number: int, *arguments: Any) -> None:
        if (pid := call("syscall", number, *arguments)) == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def opened(path: Path, flags: int) -> None:
        os.close(os.open(path, flags))

    def own_truncated() -> None:
        path = temporary / "b"
        with path.open("w") as file:
            file.write("가나")
        with path.open("r+") as file:
            file.truncate(3)
        if path.read_text() != "가":
            raise RuntimeError
        opened(path, os.O_WRONLY | os.O_TRUNC)

    def remote() -> None:
        buffer = ctypes.create_string_buffer(8)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
        call("process_vm_readv", server, vector, 1, vector, 1, 0)

    def shared() -> None:
        context = multiprocessing.get_context("fork")
        lock = context.Lock()
        lock.acquire()
        started = context.Process(target=lock.release)
        started.start()
        if not lock.acquire(timeout=60):
            raise RuntimeError
        started.join()

    return {
        "allowed": {
            "reads its model": lambda: (model / "weights").read_text(encoding="utf-8"),
            "writes to its temporary folder": lambda: Path(os.environ["HOME"], "a").write_text(
                "가"
            ),
            "imports": lambda: __import__("wave"),
            "runs programs": lambda: subprocess.run(
                ["grep", "-q", "가중치", str(model / "weights")], check=True
            ),
            "has threads": threading.Thread(target=int).start,
            "has processes": shared,
            "has pairs of sockets": pair,
            "uses the network": lambda: socket.create_connection(address, timeout=10).close(),
            "reads the machine's state": lambda: Path("/proc/meminfo").read_text(),
            "signals itself": lambda: os.kill(os.getpid(), 0),
            "has pairs of sockets for packets": lambda: pair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
            "truncates its own file": own_truncated,
        },
        "landlock": {
            "changes its model": lambda: (model / "weights").write_text("x"),
            "reads another model": weights.read_text,
            "reads another model by a program": lambda: subprocess.run(
                ["cat", str(weights)], capture_output=True, check=True
            ),
            "changes another model": lambda: weights.write_text("x"),
            "truncates its model": lambda: os.truncate(model / "weights", 0),
            "truncates its model as it reads": lambda: opened(
                model / "weights", os.O_RDONLY | os.O_TRUNC
            ),
            "truncates another model": lambda: os.truncate(weights, 0),
            "truncates another model as it opens it for nothing": lambda: opened(
                weights, os.O_ACCMODE | os.O_TRUNC
            ),
            "removes another model": weights.unlink,
            "lists the server's folder": lambda: os.listdir(folder),
            "links to another model": lambda: os.link(weights, temporary / "linked"),
            "moves another model": lambda: os.rename(weights, temporary / "moved"),
            "makes a device": lambda: os.mknod(temporary / "device", 0o20666, os.makedev(1, 3)),
            "reads the server's environment": lambda: Path(f"/proc/{server}/environ").read_bytes(),
            "reads the server's memory": lambda: opened(Path(f"/proc/{server}/mem"), os.O_RDONLY),
            "reads the server's memory by a call": remote,
            "traces the server": lambda: call("ptrace", PTRACE_SEIZE, server, None, None),
            "is less expendable": lambda: Path("/proc/self/oom_score_adj").write_text("0"),
            # Below the test's own folder: where it is allowed, the machine's /tmp must not vanish.
            "mounts": lambda: call("mount", b"none", os.fsencode(temporary), b"tmpfs", 0, None),
        },
        "seccomp": {
            "sets an attribute of another model": lambda: os.setxattr(weights, "user.a", b"x"),
            "makes System V's memory": partial(made, "shmget", 0, 1 << 20, 0o1600),
            "makes System V's semaphores": partial(made, "semget", 0, 1, 0o1600),
            "makes System V's queues": partial(made, "msgget", 0, 0o1600),
            "makes POSIX's queues": partial(made, "mq_open", 0, os.O_CREAT, 0o600, 0),
            "opens files by number": lambda: call("open_by_handle_at", -100, None, 0),
            "connects to a socket of the server": lambda: connect(str(folder / "mms.sock")),
            "connects half of a pair": partial(half_of_a_pair, socket.SOCK_STREAM, "mms.sock"),
            "sends by half of a pair": partial(half_of_a_pair, socket.SOCK_DGRAM, "log.sock"),
            "connects to an abstract socket": lambda: connect(f"\0{folder.name}"),
            "lists sockets by netlink": partial(
                socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 4
            ),
            "has io_uring": lambda: call("syscall", 425, 1, None),
            "limits the server": lambda: resource.prlimit(server, resource.RLIMIT_CPU),
            "starts a process in a user namespace": lambda: cloned(
                seccomp.CLONE[COLUMN], CLONE_NEWUSER | signal.SIGCHLD, *[ctypes.c_void_p()] * 4
            ),
            "starts a process in a user namespace by clone3": lambda: cloned(
                seccomp.CLONE3[COLUMN],
                (ctypes.c_uint64 * 8)(CLONE_NEWUSER, 0, 0, 0, signal.SIGCHLD),
                ctypes.c_size_t(64),
            ),
            "makes a user namespace": lambda: call("unshare", CLONE_NEWUSER),
        },
        "scope or user": {
            "signals the server": lambda: os.kill(server, 0),
            "signals everybody": lambda: os.kill(1, signal.SIGCONT),
        },
        "user": {
            "changes the mode of another model": lambda: os.chmod(weights, 0),
            "slows the server down": lambda: os.setpriority(os.PRIO_PROCESS, server, 1),
        },
        "capabilities": {
            "becomes root": lambda: os.setuid(0),
        },
    }


if __name__ == "__main__":
    main()
