"""Which system calls a model's script is refused, it and all that it starts.

What this is for: a script cannot connect to a unix socket, so neither Multi Model Server nor the
engine, which trust whoever reaches their sockets, hear from it. `socketpair` stays, and with it
`multiprocessing` and `asyncio`; a `multiprocessing.Manager` needs a socket and does not work.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket

from common.seccomp import (
    ALLOW,
    ARCHITECTURE,
    ARCHITECTURES,
    ARGUMENTS,
    ERRNO,
    JEQ,
    JGE,
    LOAD,
    NUMBER,
    PRLIMIT64,
    RETURN,
    X32,
    Instruction,
    load,
)

# Numbers on x86-64 and aarch64.
SOCKET, OPEN_BY_HANDLE_AT, IO_URING_SETUP = (41, 198), (304, 265), (425, 425)
NETLINK_ROUTE = 0  # tells of addresses and routes; the other protocols of netlink list sockets


def available() -> bool:
    return platform.machine() in ARCHITECTURES


def refuse_calls(network: bool) -> None:
    """Filters this thread and what it starts, for good. Needs `no_new_privs`.

    Sockets are those of IP, with `network`, and netlink's for routes. Raises `OSError`.
    """
    if not load(ctypes.CDLL(None), _program(platform.machine(), network)):
        raise OSError(errno.ENOSYS, "the kernel takes no seccomp filter")


def _program(machine: str, network: bool) -> list[Instruction]:
    column = list(ARCHITECTURES).index(machine)
    families = (socket.AF_INET, socket.AF_INET6) if network else ()
    return [
        (LOAD, 0, 0, ARCHITECTURE),
        (JEQ, 1, 0, ARCHITECTURES[machine]),
        _refuse(errno.ENOSYS),
        (LOAD, 0, 0, NUMBER),
        (JGE, 0, 1, X32),
        _refuse(errno.ENOSYS),
        # io_uring makes and connects sockets without the calls that are filtered here.
        *_if_call(IO_URING_SETUP[column], [_refuse(errno.ENOSYS)]),
        # Opens files by their number, past the folders that lead to them.
        *_if_call(OPEN_BY_HANDLE_AT[column], [_refuse(errno.EPERM)]),
        # Sets limits of other processes of the same user.
        *_if_call(PRLIMIT64[column], [*_unless(0, 0, errno.EPERM), (RETURN, 0, 0, ALLOW)]),
        *_if_call(
            SOCKET[column],
            [
                (LOAD, 0, 0, ARGUMENTS),
                *(step for f in families for step in ((JEQ, 0, 1, f), (RETURN, 0, 0, ALLOW))),
                *_unless(0, socket.AF_NETLINK, errno.EACCES),
                *_unless(2, NETLINK_ROUTE, errno.EACCES),
                (RETURN, 0, 0, ALLOW),
            ],
        ),
        (RETURN, 0, 0, ALLOW),
    ]


def _refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


def _unless(argument: int, value: int, error: int) -> list[Instruction]:
    """Refuses the call if the low half of its argument is another."""
    return [(LOAD, 0, 0, ARGUMENTS + 8 * argument), (JEQ, 1, 0, value), _refuse(error)]


def _if_call(number: int, steps: list[Instruction]) -> list[Instruction]:
    """`steps`, which return, for the call of this number."""
    return [(JEQ, 0, len(steps), number), *steps]
