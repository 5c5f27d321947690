"""Opens files that only root may read, for a server that has given up root.

`python -I file_opener.py SOCKET FOLDER...` runs as root and imports the standard library only. Each
message on SOCKET is a path below one of the folders, with a socket for the reply: `0` and the open
file or folder, or the number of an error. The process itself reads and writes no file and follows
no link. It ends when the other end of SOCKET is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MAX_PATH_BYTES = 8192
FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: opening a pipe must not block


def start(folders: Sequence[Path]) -> socket.socket:
    """Start the process as root; return the socket for requests. Closing it ends the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(theirs.fileno()), *map(str, folders)],
            pass_fds=[theirs.fileno()],
            env={},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    process.returncode = 0  # not waited for by Popen: the supervisor reaps everything
    return ours


def serve(requests: socket.socket, folders: Sequence[bytes]) -> None:
    while True:
        path, sockets, _, _ = socket.recv_fds(requests, MAX_PATH_BYTES, 1)
        if not path:
            return
        for descriptor in sockets:
            with socket.socket(fileno=descriptor) as answer, contextlib.suppress(OSError):
                _answer(answer, path, folders)


def _answer(answer: socket.socket, path: bytes, folders: Sequence[bytes]) -> None:
    try:
        file = open_below(path, folders)
    except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
        answer.send(b"%d" % (getattr(error, "errno", None) or errno.EINVAL))
        return
    try:
        socket.send_fds(answer, [b"0"], [file])
    finally:
        os.close(file)


def open_below(path: bytes, folders: Sequence[bytes]) -> int:
    """Open a file or folder below `folders`. Raises `OSError`, also for links, `..` and pipes."""
    inside = (folder for folder in folders if path == folder or path.startswith(folder + b"/"))
    folder = next(inside, None)
    if folder is None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    opened = os.open(folder, FLAGS | os.O_DIRECTORY)
    try:
        for name in filter(None, path[len(folder) :].split(b"/")):
            if name in (b".", b".."):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            inner = os.open(name, FLAGS | os.O_NOFOLLOW, dir_fd=opened)
            os.close(opened)
            opened = inner
        mode = os.fstat(opened).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    except BaseException:
        os.close(opened)
        raise
    return opened


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), [os.fsencode(name) for name in sys.argv[2:]])
