"""Landlock: a process limits what it and all that it starts may do with files, for good.

https://docs.kernel.org/userspace-api/landlock.html; it needs no privileges, only a kernel that has
it (5.13; its ABI says what more it can). Connecting to a unix socket is no use of its file here,
nor are chmod, chown and utime: `seccomp` and a uid deal with what they can.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

# The system calls have one number on all architectures.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION = 1 << 0
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
# How many rights on files each ABI knows; those of a later one are left alone.
KNOWN = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
TRUNCATE_ABI, SCOPES_ABI = 3, 6
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1 << 0, 1 << 1

READ = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """What this kernel has, 0 if nothing, or nothing that this process may use."""
    try:
        return _call(CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str] = ()) -> None:
    """From now on this thread, and what it starts, reads and executes below `read` and `write`,
    writes below `write`, uses `devices`, and nothing else; what does not exist is passed over.

    From ABI 3 on it truncates only what it writes, from 6 on it signals only what it has started
    itself. From the first on it traces, and reads the memory and environment, of nothing else.
    Needs `no_new_privs`. Raises `OSError`.
    """
    version = abi()
    every = (1 << KNOWN[min(version, max(KNOWN))]) - 1
    ruleset = _Ruleset(every, 0, 0)
    if version >= SCOPES_ABI:
        ruleset.scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL
    rules = _call(CREATE_RULESET, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0)
    try:
        for path in read:
            _allow(rules, path, READ & every)
        for path in write:
            _allow(rules, path, every & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV))
        for path in devices:
            _allow(rules, path, (READ | WRITE_FILE | IOCTL_DEV) & every)
        _call(RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= OF_FILES
        beneath = _PathBeneath(access, descriptor)
        _call(ADD_RULE, rules, RULE_PATH_BENEATH, ctypes.byref(beneath), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
