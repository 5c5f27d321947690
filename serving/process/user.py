"""Gives up root: SageMaker and `docker run --user 0` start a container as root."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

from serving.errors import StartError


def become(uid: int, writable: Iterable[Path]) -> None:
    """Change this process's user irreversibly, and make the user own the folders `writable`.

    Folders that do not exist are created. Folders that all users may write to keep their owner.
    Raises `StartError`.
    """
    try:
        entry = pwd.getpwuid(uid)
        gid, home = entry.pw_gid, entry.pw_dir
    except KeyError:
        gid, home = uid, "/"
    for folder in writable:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != uid and not status.st_mode & stat.S_IWOTH:
                os.chown(folder, uid, gid)
        except OSError as error:
            raise StartError(
                f"{folder} cannot be given to user {uid} (RUN_AS_USER): {error.strerror}"
            ) from None
    try:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except (OSError, OverflowError) as error:
        raise StartError(
            f"root cannot become user {uid} (RUN_AS_USER): {error}. Start the container as that"
            f" user (docker run --user {uid}), or with the capabilities SETUID and SETGID"
        ) from None
    os.environ["HOME"] = home
