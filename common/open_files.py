"""The limit of open files of this process."""

from __future__ import annotations

import resource


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard limit; return that limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
