"""Functions that the tests run in sandboxes."""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import mmap
import os
import platform
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import seccomp
from common.errors import PromptTooLong
from common.landlock import call


def echo(value: Any) -> Any:
    return value


def hostile_tokenizer(*source: Any) -> Callable[..., Any]:
    """A text process that returns whatever the field `ids` of a prompt has as JSON."""
    from engine.text.child import serve

    child = serve(*source)

    def answer(method: str, *arguments: Any) -> Any:
        if method == "encode" and isinstance(arguments[0], dict):
            return json.loads(arguments[0]["ids"])
        return child(method, *arguments)

    return answer


def servant(prefix: str) -> Callable[[str], str]:
    calls = 0

    def serve(text: str) -> str:
        nonlocal calls
        calls += 1
        if text == "refuse":
            raise PromptTooLong("너무 길어요")
        if text == "crash":
            segfault()
        if text == "sleep":
            loop()
        return f"{prefix}{text} {calls}"

    return serve


def wait_for(path: str) -> str:
    """Return the content of a file, once it exists."""
    while not (file := Path(path)).exists() or not (text := file.read_text("utf-8")):
        time.sleep(0.01)
    return text


def segfault() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def bomb() -> int:
    return len(bytearray(4 << 30))


def native_bomb() -> int:
    """Allocate as a C library that does not check the result of malloc."""
    size = 4 << 30
    ctypes.CDLL(None).malloc.restype = ctypes.c_void_p
    ctypes.memset(ctypes.CDLL(None).malloc(ctypes.c_size_t(size)), 1, size)
    return size


def loop() -> None:
    while True:
        pass


def wait() -> None:
    time.sleep(600)


def surprise() -> None:
    raise LookupError("a secret path")


def long_answer() -> str:
    return "가" * (1 << 20)


def leave() -> None:
    os._exit(3)


def log(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def _errno(attempt: Callable[[], Any]) -> int:
    try:
        attempt()
    except OSError as error:
        return error.errno or 0
    return 0


def attempts(folder: str, pid: int, own: int = -1) -> dict[str, int]:
    """What it may not do, with the error number that it got, 0 where it could.

    own: a descriptor of a file that it may write
    """
    file, new = Path(folder) / "file", Path(folder) / "new"
    reader, _ = os.pipe()
    column = list(seccomp.ARCHITECTURES).index(platform.machine())

    calls = {**seccomp.OTHERS, **seccomp.IPC, **seccomp.MEMORY_FILES}

    def syscall(name: str, *arguments: int) -> Callable[[], Any]:
        number = calls[name][column]
        return lambda: call("syscall", number, *map(ctypes.c_long, arguments))

    return {
        "socket": _errno(socket.socket),
        "execve": _errno(lambda: os.execv("/bin/true", ["true"])),  # noqa: S606
        "fork": _errno(os.fork),
        "kill": _errno(lambda: os.kill(pid, 0)),
        "F_SETOWN": _errno(lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, pid)),
        "F_SETSIG": _errno(lambda: fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)),
        "F_SETOWN_EX": _errno(lambda: fcntl.fcntl(reader, 15, struct.pack("ii", 1, pid))),
        "FIOSETOWN": _errno(lambda: fcntl.ioctl(reader, 0x8901, struct.pack("i", pid))),
        "SIOCSPGRP": _errno(lambda: fcntl.ioctl(reader, 0x8902, struct.pack("i", pid))),
        "affinity": _errno(lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid))),
        "scheduler": _errno(lambda: os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))),
        "sched_param": _errno(lambda: os.sched_setparam(pid, os.sched_param(0))),
        "ioprio_set": _errno(syscall("ioprio_set", 1, pid, 0)),
        "migrate_pages": _errno(syscall("migrate_pages", pid, 0, 0, 0)),
        "move_pages": _errno(syscall("move_pages", pid, 0, 0, 0, 0, 0)),
        "System V's memory": _errno(syscall("shmget", 0, 1 << 20, 0o1600)),
        "System V's queue": _errno(syscall("msgget", 0, 0o1600)),
        "System V's semaphore": _errno(syscall("semget", 0, 1, 0o1600)),
        "POSIX's queue": _errno(syscall("mq_open", 0, os.O_CREAT, 0o600, 0)),
        "a file in memory": _errno(lambda: os.memfd_create("글")),
        "shared memory": _errno(lambda: mmap.mmap(-1, 1 << 20)),
        "a stack": _errno(lambda: mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | seccomp.MAP_GROWSDOWN)),
        "own memory": _errno(lambda: mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE)),
        "own affinity": _errno(lambda: os.sched_setaffinity(0, os.sched_getaffinity(0))),
        "open to write": _errno(lambda: file.open("r+")),
        "another's memory": _errno(lambda: Path(f"/proc/{pid}/mem").open("r+b")),
        "another's memory, to read": _errno(lambda: Path(f"/proc/{pid}/mem").open("rb")),
        "own file anew": _errno(lambda: Path(f"/proc/self/fd/{own}").open("r+b")),
        "own file's size": _errno(lambda: os.ftruncate(own, 0)),
        "own file's length": _errno(lambda: os.posix_fallocate(own, 0, 1 << 20)),
        "truncate": _errno(lambda: os.truncate(file, 0)),
        "create": _errno(lambda: new.write_text("x")),
        "unlink": _errno(file.unlink),
        "rename": _errno(lambda: file.rename(new)),
        "mkdir": _errno(new.mkdir),
        "chmod": _errno(lambda: file.chmod(0o777)),
        "read": _errno(file.read_bytes),
    }


def limits() -> dict[str, Any]:
    import resource

    return {
        "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "ignored": [
            s.name for s in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(s) == signal.SIG_IGN
        ],
        "threads": len(os.listdir("/proc/self/task")),
        "open": sorted(map(int, os.listdir("/proc/self/fd"))),
    }


def attempts_and_write(folder: str, pid: int, own: int) -> dict[str, int]:
    found = attempts(folder, pid, own)
    with mmap.mmap(own, 0) as mapped:
        mapped[: len("글".encode())] = "글".encode()
    return found


def read(path: str) -> dict[str, Any]:
    """Read as `manifest.read`, with the fault that a file `fault` in the folder names."""
    from engine.prepared import manifest

    fault = Path(path, "fault")
    if fault.exists():
        {"crash": segfault, "loop": loop, "bomb": bomb, "wait": wait}[fault.read_text()]()
    return manifest.read(path)
