"""Landlock: permanently restricts which files a process and its children may use.

Needs no privileges but Linux 5.13; later versions of its ABI restrict more. Landlock controls
neither connections to unix sockets nor chmod, chown and utime: seccomp and a separate user do.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

# System call numbers, the same on all architectures.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION = 1 << 0
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
# ABI version -> number of file rights that it defines; rights of later versions are not restricted.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
TRUNCATE_ABI, SCOPES_ABI = 3, 6
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1 << 0, 1 << 1

READ = EXECUTE | READ_FILE | READ_DIR
RIGHTS_ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


RULESET = "=QQQ"  # handled_access_fs, handled_access_net, scoped
PATH_BENEATH = "=Qi"  # allowed_access, parent_fd


def abi() -> int:
    """Return the kernel's Landlock version; 0 if it has none, or this process may not use it."""
    try:
        return _call(CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str] = ()) -> None:
    """Restricts which files this thread and its children may use.

    They may read and execute below `read` and `write`, write below `write`, and use `devices`.
    Paths that do not exist are skipped. Every ABI also forbids tracing other processes and reading
    their memory and environment. From ABI 3 only writable files can be truncated; from 6 only own
    children can be signalled.

    Needs `no_new_privs`. Raises `OSError`.
    """
    version = abi()
    handled = (1 << FILE_RIGHTS[min(version, max(FILE_RIGHTS))]) - 1
    scoped = SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL if version >= SCOPES_ABI else 0
    ruleset = struct.pack(RULESET, handled, 0, scoped)
    rules = _call(CREATE_RULESET, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    try:
        for path in read:
            _allow(rules, path, READ & handled)
        for path in write:
            _allow(rules, path, handled & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV))
        for path in devices:
            _allow(rules, path, (READ | WRITE_FILE | IOCTL_DEV) & handled)
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
            access &= RIGHTS_ON_FILES
        _call(ADD_RULE, rules, RULE_PATH_BENEATH, struct.pack(PATH_BENEATH, access, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    return call("syscall", ctypes.c_long(number), *arguments)


def call(function: str, *arguments: object) -> int:
    """Call a function of the C library. Raises `OSError`."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
