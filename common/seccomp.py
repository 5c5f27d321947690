"""A filter on system calls for a process that only computes: no network, no other process, no
program, and, where it may not write, no change of any file.

In classic BPF, as the kernel's Documentation/userspace-api/seccomp_filter.rst has it. What is
refused fails with EPERM. Not hidden are files that this user may read: nothing leaves the process
but its answers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from typing import Any

PR_SET_SECCOMP = 22
MODE_FILTER = 2
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
LOAD, JEQ, JGE, JSET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# In `struct seccomp_data`: nr, arch, instruction_pointer, args[6]; little endian.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # numbers from here on are those of x86-64's other ABI
CLONE_THREAD = 0x10000
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC: the same on both.
OPENS_TO_WRITE = 0o1 | 0o2 | 0o100 | 0o1000

# Numbers on x86-64 and aarch64, from the kernel's own tables; -1: there is none.
FORBIDDEN = {
    # network
    "socket": (41, 198),
    "socketpair": (53, 199),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "connect": (42, 203),
    # programs and other processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, -1),
    "vfork": (58, -1),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "setrlimit": (160, 164),
    # the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
WRITES = {
    "creat": (85, -1),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "rename": (82, -1),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, -1),
    "mkdirat": (258, 34),
    "rmdir": (84, -1),
    "link": (86, -1),
    "linkat": (265, 37),
    "unlink": (87, -1),
    "unlinkat": (263, 35),
    "symlink": (88, -1),
    "symlinkat": (266, 36),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
CLONE, CLONE3 = (56, 220), (435, 435)
TGKILL, PRLIMIT64 = (234, 131), (302, 261)
OPEN, OPENAT, OPENAT2 = (2, -1), (257, 56), (437, 437)

Instruction = tuple[int, int, int, int]  # code, where to jump if true, if false, operand


def install(libc: Any, may_write: bool) -> bool:
    """Filters this process and what it starts, for good. False where the kernel cannot."""
    machine = platform.machine()
    return machine in ARCHITECTURES and load(libc, _program(machine, may_write))


def load(libc: Any, program: Sequence[Instruction]) -> bool:
    """The same with a program of one's own, for this thread. Needs `no_new_privs`."""
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):  # struct sock_fprog
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filtered = Program(len(program), ctypes.addressof(buffer))
    status: int = libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filtered), 0, 0)
    return status == 0


def _program(machine: str, may_write: bool) -> list[Instruction]:
    column = list(ARCHITECTURES).index(machine)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JEQ, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
        (JGE, 0, 1, X32),
        (RETURN, 0, 0, ERRNO | EPERM),
    ]

    def refuse(numbers: tuple[int, int], error: int = EPERM) -> None:
        if numbers[column] >= 0:
            program.append((JEQ, 0, 1, numbers[column]))
            program.append((RETURN, 0, 0, ERRNO | error))

    def decide(
        numbers: tuple[int, int], argument: int, test: int, operand: int, allows: bool = True
    ) -> None:
        """Allows the call if the low half of an argument passes, or only if it does not."""
        refused, allowed = (RETURN, 0, 0, ERRNO | EPERM), (RETURN, 0, 0, ALLOW)
        if numbers[column] >= 0:
            program.extend(
                [
                    (JEQ, 0, 4, numbers[column]),
                    (LOAD, 0, 0, ARGUMENTS + 8 * argument),
                    (test, 0, 1, operand),
                    *((allowed, refused) if allows else (refused, allowed)),
                ]
            )

    for numbers in FORBIDDEN.values():
        refuse(numbers)
    # Threads, but no processes. glibc asks clone3 first, whose arguments no filter can see.
    refuse(CLONE3, ENOSYS)
    decide(CLONE, 0, JSET, CLONE_THREAD)
    decide(TGKILL, 0, JEQ, os.getpid())  # abort() is its own
    decide(PRLIMIT64, 0, JEQ, 0)  # nobody else's limits
    if not may_write:
        for numbers in WRITES.values():
            refuse(numbers)
        refuse(OPENAT2, ENOSYS)
        decide(OPEN, 1, JSET, OPENS_TO_WRITE, allows=False)
        decide(OPENAT, 2, JSET, OPENS_TO_WRITE, allows=False)
    program.append((RETURN, 0, 0, ALLOW))
    return program
