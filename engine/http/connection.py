"""A worker's connection to the engine's socket, for one request after another.

It implements the part of HTTP/1.1 that the engine uses, with two system calls a request;
`http.client` took a third of a worker's time.
"""

from __future__ import annotations

import socket
from pathlib import Path

READ_BYTES = 65_536
MAX_HEAD_BYTES = 65_536


class Connection:
    """A blocking connection. Another thread may shut `socket` down, which ends a request."""

    def __init__(self, path: Path | str, timeout_s: float) -> None:
        """Connect. Raises `OSError`."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.settimeout(timeout_s)
            self.socket.connect(str(path))
        except BaseException:
            self.socket.close()
            raise

    def request(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers by lower-case names, and body.

        Raises `ConnectionResetError` where the connection was closed before the answer began,
        `TimeoutError` where nothing comes for `timeout_s`, and `OSError` where the answer is not
        complete or not HTTP.
        """
        head = f"{method} {url} HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n"
        if body is not None:
            head += f"content-length: {len(body)}\r\n"
        self.socket.settimeout(timeout_s)
        self.socket.sendall(head.encode("ascii") + b"\r\n" + (body or b""))
        return self._answer()

    def _answer(self) -> tuple[int, dict[str, str], bytes]:
        read = self.socket.recv(READ_BYTES)
        if not read:
            raise ConnectionResetError("the connection was closed")
        while (end := read.find(b"\r\n\r\n")) < 0:
            if len(read) > MAX_HEAD_BYTES:
                raise OSError("the answer's head is too long")
            read += self._more()
        first, *lines = read[:end].decode("latin-1").split("\r\n")
        if not first.startswith("HTTP/1.1 ") or not first[9:12].isdecimal():
            raise OSError("the answer is not HTTP")
        status = int(first[9:12])
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = read[end + 4 :]
        length = "0" if status == 204 else headers.get("content-length", "")
        if not length.isdecimal():
            raise OSError("the answer has no length")
        while len(body) < int(length):
            body += self._more()
        return status, headers, body

    def _more(self) -> bytes:
        read = self.socket.recv(READ_BYTES)
        if not read:
            raise OSError("the answer is not complete")
        return read

    def close(self) -> None:
        self.socket.close()
