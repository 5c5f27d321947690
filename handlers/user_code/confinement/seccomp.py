"""The seccomp filter of a model's script: which system calls fail in it and in its children.

The only sockets are IP's (with `network`), netlink's for routes, and connected pairs, which
`multiprocessing` and `asyncio` use. So no script connects to Multi Model Server or to the engine,
whose sockets need no authentication. `multiprocessing.Manager` does not work.
"""

from __future__ import annotations

import ctypes
import platform
import socket
from collections.abc import Iterator
from errno import EACCES, ENOSYS, EOPNOTSUPP

from common import seccomp as bpf
from common.seccomp import ALLOWED, JEQ, Rule, argument, refuse, refused

NETLINK_ROUTE = 0  # addresses and routes; other netlink protocols list sockets
SOCKET_TYPE = 0xF  # without SOCK_CLOEXEC and SOCK_NONBLOCK
O_TRUNC, O_ACCMODE, O_WRONLY, O_RDWR = 0o1000, 0o3, 0o1, 0o2


def available() -> bool:
    return platform.machine() in bpf.ARCHITECTURES


def refuse_calls(network: bool, truncation: bool, shared_memory: bool) -> None:
    """Permanently filters this thread and its children. Needs `no_new_privs`. Raises `OSError`.

    `shared_memory`: allow memory that processes can share, which RLIMIT_DATA does not count.
    `truncation`: also refuse to truncate files that are not open for writing, which Landlock before
    ABI 3 does not restrict.
    """
    rules = [*_rules(network), *(_truncation() if truncation else ())]
    rules += () if shared_memory else bpf.only_private_memory()
    if not bpf.load(ctypes.CDLL(None), rules):
        raise OSError(ENOSYS, "the kernel does not support seccomp filters")


def _rules(network: bool) -> Iterator[Rule]:
    yield from bpf.always()
    # The error is that of file systems without extended attributes.
    yield from refuse(bpf.EXTENDED_ATTRIBUTES.values(), EOPNOTSUPP)
    yield bpf.CLONE, [argument(0), (bpf.JSET, 0, 1, bpf.NEW_NAMESPACES), refused(), ALLOWED]
    families = (socket.AF_INET, socket.AF_INET6) if network else ()
    yield (
        bpf.OTHERS["socket"],
        [
            argument(0),
            *(step for family in families for step in ((JEQ, 0, 1, family), ALLOWED)),
            *((JEQ, 1, 0, socket.AF_NETLINK), refused(EACCES)),
            *(argument(2), (JEQ, 1, 0, NETLINK_ROUTE), refused(EACCES)),
            ALLOWED,
        ],
    )
    # Either half of a pair of datagram sockets could send to any datagram socket.
    yield (
        bpf.OTHERS["socketpair"],
        [
            *(argument(0), (JEQ, 1, 0, socket.AF_UNIX), refused(EACCES)),
            *(argument(1), (bpf.AND, 0, 0, SOCKET_TYPE)),
            *((JEQ, 0, 1, socket.SOCK_STREAM), ALLOWED),
            *((JEQ, 0, 1, socket.SOCK_SEQPACKET), ALLOWED),
            refused(EACCES),
        ],
    )


def _truncation() -> Iterator[Rule]:
    """Refuse `truncate` by path, and `O_TRUNC` unless the file is opened for writing."""
    yield from refuse([bpf.WRITES["truncate"]], EACCES)
    yield from refuse([bpf.OPENAT2], ENOSYS)
    for call, flags in ((bpf.OPEN, 1), (bpf.OPENAT, 2)):
        yield (
            call,
            [
                *(argument(flags), (bpf.JSET, 1, 0, O_TRUNC), ALLOWED),
                (bpf.AND, 0, 0, O_ACCMODE),
                *((JEQ, 0, 1, O_WRONLY), ALLOWED),
                *((JEQ, 0, 1, O_RDWR), ALLOWED),
                refused(EACCES),
            ],
        )
