"""Keeps a process's memory and environment from others of the same user.

Models' own scripts run as the server's user, and the kernel lets a user's processes read each
other's `/proc/<pid>/environ`: the credentials that are kept out of a script's environment would be
there.
"""

from __future__ import annotations

import ctypes

PR_SET_DUMPABLE = 4


def close_to_others() -> None:
    """Until this process executes another program. Has no effect against root."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
