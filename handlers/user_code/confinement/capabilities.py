"""Linux capabilities of this process: https://man7.org/linux/man-pages/man7/capabilities.7.html."""

from __future__ import annotations

import ctypes
from collections.abc import Set

from common.landlock import call

CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, KILL, SETGID, SETUID = 0, 1, 2, 5, 6, 7
# Root needs these to start a program as another user, give it a folder, and kill it.
SWITCH_USER = frozenset({CHOWN, KILL, SETGID, SETUID})

VERSION_3 = 0x20080522
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2


_Header = ctypes.c_uint32 * 2  # version, pid
_Data = ctypes.c_uint32 * 6  # effective, permitted, inheritable; then those from 32 on


def permitted() -> set[int]:
    """Return the permitted capabilities of this process."""
    data = _Data()
    call("capget", _Header(VERSION_3, 0), data)
    return {bit for bit in range(32) if data[1] >> bit & 1}


def drop_all_but(remaining: Set[int]) -> None:
    """Drop all other capabilities of this thread and the programs it runs. Raises `OSError`."""
    bits = sum(1 << bit for bit in remaining)
    call("capset", _Header(VERSION_3, 0), _Data(bits, bits, bits))
    for bit in remaining:
        ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, bit, 0, 0)
