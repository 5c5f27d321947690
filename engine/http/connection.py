"""One connection to the engine's socket, for workers: a request and its whole answer, in turns.

As much of HTTP/1.1 as the engine speaks, in two calls of the kernel: `http.client` took a third of
a worker's time for a request.
"""

from __future__ import annotations

import socket
from pathlib import Path

READ_BYTES = 65_536
MAX_HEAD_BYTES = 65_536


class Connection:
    """Blocking. `socket` may be shut down by another thread, which ends what waits here."""

    def __init__(self, path: Path | str, timeout_s: float) -> None:
        """Raises `OSError`."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.settimeout(timeout_s)
            self.socket.connect(str(path))
        except BaseException:
            self.socket.close()
            raise

    def ask(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by their names in lower case, and body.

        Raises `ConnectionResetError` where it was closed before an answer began, `OSError` where
        there is none or no whole one, `TimeoutError` where nothing comes for `timeout_s`.
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
