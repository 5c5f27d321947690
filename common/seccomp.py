"""System call filters for processes that read untrusted data or run untrusted programs.

They are classic BPF, see the kernel's Documentation/userspace-api/seccomp_filter.rst. `install` is
for a process that only computes: no network, no other process, no program, no change of any file
but by descriptors that it has. It can still read files that its user may read, but send nothing
except its answers. `handlers.user_code.confinement.seccomp` is for a model's own program.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable, Iterator, Sequence
from errno import ENOSYS, EPERM
from typing import Any

PR_SET_SECCOMP = 22
MODE_FILTER = 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, AND, JEQ, JGE, JSET, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
# In `struct seccomp_data`: nr, arch, instruction_pointer, args[6]; little endian.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # numbers from here on are those of x86-64's other ABI
CLONE_THREAD = 0x10000
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
NEW_NAMESPACES = 0x7E020000
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC: the same on both architectures.
OPENS_TO_WRITE = 0o1 | 0o2 | 0o100 | 0o1000

Numbers = tuple[int, int]  # on x86-64 and aarch64, from the kernel's own tables; -1: there is none
Instruction = tuple[int, int, int, int]  # code, how many to skip if true, if false, operand
Rule = tuple[Numbers, Sequence[Instruction]]  # a call's numbers, and the instructions for it

# Calls that no process with untrusted data or programs needs: ways around other checks, and parts
# of the kernel with many known vulnerabilities. A user namespace would give all capabilities in it.
KERNEL = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "chroot": (161, 51),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "open_by_handle_at": (304, 265),  # skips the checks of a path's folders
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
# System V's and POSIX's shared memory, semaphores and queues. They count in no limit of a process,
# outlive it, and are open to other processes of its user.
IPC = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}
# io_uring creates and connects sockets without the calls for that. Programs work without it.
IO_URING_SETUP = (425, 425)
# Calls that change the extended attributes of files that the user owns.
EXTENDED_ATTRIBUTES = {
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
OTHERS = {  # calls with effects outside of the process
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
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setrlimit": (160, 164),
}
SCHEDULING = {  # their first argument is a thread of any process, 0 for the calling thread
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
# Commands that choose which process gets which signal when a file becomes ready, such as SIGKILL
# for any process of the user.
FCNTL, OWNER_FCNTLS = (72, 25), (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
IOCTL, OWNER_IOCTLS = (16, 29), (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP
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
    **EXTENDED_ATTRIBUTES,
}
# Files in memory, which no limit counts.
MEMORY_FILES = {"memfd_create": (319, 279), "memfd_secret": (447, 447)}
MMAP, MAP_SHARED_ANONYMOUS, MAP_GROWSDOWN = (9, 222), 0x21, 0x100
CLONE, CLONE3 = (56, 220), (435, 435)
TGKILL, PRLIMIT64 = (234, 131), (302, 261)
OPEN, OPENAT, OPENAT2 = (2, -1), (257, 56), (437, 437)


def install(libc: Any) -> bool:
    """Permanently filter this process and its children; returns False if the kernel cannot."""
    return load(libc, _computing())


def load(libc: Any, rules: Iterable[Rule]) -> bool:
    """Filter this thread by the given rules; all other calls are allowed.

    Needs `no_new_privs`.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        return False
    program = _program(machine, rules)
    packed = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):  # struct sock_fprog
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filtered = Program(len(program), ctypes.addressof(buffer))
    status: int = libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filtered), 0, 0)
    return status == 0


def _program(machine: str, rules: Iterable[Rule]) -> list[Instruction]:
    """Assemble the filter of some rules; it also refuses calls of another ABI."""
    column = list(ARCHITECTURES).index(machine)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JEQ, 1, 0, ARCHITECTURES[machine]),
        refused(ENOSYS),
        (LOAD, 0, 0, NUMBER),
        (JGE, 0, 1, X32),
        refused(ENOSYS),
    ]
    for numbers, steps in rules:
        if numbers[column] >= 0:
            program += [(JEQ, 0, len(steps), numbers[column]), *steps]
    return [*program, ALLOWED]


ALLOWED: Instruction = (RETURN, 0, 0, ALLOW)


def refused(error: int = EPERM) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


def argument(number: int) -> Instruction:
    """Return the instruction that loads the low 32 bits of an argument."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * number)


def always() -> Iterator[Rule]:
    """Yield the rules of all filters: no `KERNEL` or `IPC` calls, no limits of other processes."""
    yield from refuse([*KERNEL.values(), *IPC.values()])
    yield from refuse([IO_URING_SETUP, CLONE3], ENOSYS)  # no filter sees clone3's arguments
    yield PRLIMIT64, [argument(0), (JEQ, 1, 0, 0), refused(), ALLOWED]


def only_private_memory() -> Iterator[Rule]:
    """Yield rules that refuse memory which RLIMIT_DATA does not count, except that of files."""
    yield from refuse(MEMORY_FILES.values())
    yield (
        MMAP,
        [
            *(argument(3), (JSET, 0, 1, MAP_GROWSDOWN), refused()),
            *((AND, 0, 0, MAP_SHARED_ANONYMOUS), (JEQ, 0, 1, MAP_SHARED_ANONYMOUS), refused()),
            ALLOWED,
        ],
    )


def refuse(calls: Iterable[Numbers], error: int = EPERM) -> Iterator[Rule]:
    for numbers in calls:
        yield numbers, [refused(error)]


def _computing() -> Iterator[Rule]:
    yield from always()
    yield from only_private_memory()
    yield from refuse([*OTHERS.values(), *WRITES.values()])
    yield from refuse([OPENAT2], ENOSYS)
    for call, flags in ((OPEN, 1), (OPENAT, 2)):
        yield call, [argument(flags), (JSET, 0, 1, OPENS_TO_WRITE), refused(), ALLOWED]
    # New threads are allowed, new processes are not.
    yield CLONE, [argument(0), (JSET, 1, 0, CLONE_THREAD), refused(), ALLOWED]
    yield TGKILL, [argument(0), (JEQ, 1, 0, os.getpid()), refused(), ALLOWED]  # for abort()
    for call in SCHEDULING.values():
        yield call, [argument(0), (JEQ, 1, 0, 0), refused(), ALLOWED]
    for call, commands in ((FCNTL, OWNER_FCNTLS), (IOCTL, OWNER_IOCTLS)):
        checks = (step for command in commands for step in ((JEQ, 0, 1, command), refused()))
        yield call, [argument(1), *checks, ALLOWED]
