"""Ends a process together with the one that started it, even if SIGKILL ended that one."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
SERVER_PID = "SERVER_PID"  # the variable with the entrypoint's pid


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when `parent` ends, or send it now.

    The kernel sends it when the thread of `parent` that started this process ends.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        signal.raise_signal(number)


def end_with_server(number: int = signal.SIGKILL) -> None:
    """Do so for the entrypoint; does nothing in a process that it has not started."""
    if SERVER_PID in os.environ:
        end_with_parent(int(os.environ[SERVER_PID]), number)
