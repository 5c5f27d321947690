"""A store over HTTP that sends a byte at a time, as long as somebody reads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

PAUSE_S = 0.02
SIZE = 8 << 20
HEAD = (
    'HTTP/1.1 {status}\r\nETag: "v1"\r\nContent-Length: {length}\r\n'
    "Content-Range: bytes {first}-{last}/{size}\r\n\r\n"
)


class TricklingStore:
    """`url` leads to archives: under `head/` an answer's head does not end, under `body/` its body.

    `open` counts the answers that are being sent.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.url = f"http://{self.address}"
        self.open = 0
        self._connections: list[socket.socket] = []
        self.changed = threading.Condition()

    def wait_until(self, count: int) -> None:
        """Until so many answers are being sent."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.open == count, 60), self.open

    def serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Ends all answers: whoever reads them would keep its process from ending."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            reader = connection.makefile("rb")
            while request := reader.readline().decode():
                headers = dict(
                    line.decode().rstrip().lower().split(": ", 1)
                    for line in iter(reader.readline, b"\r\n")
                )
                wanted = headers.get("range", f"bytes=0-{SIZE - 1}").removeprefix("bytes=")
                first, last = map(int, wanted.split("-"))
                status = "206 Partial Content" if "range" in headers else "200 OK"
                length = last - first + 1
                head = HEAD.format(status=status, length=length, first=first, last=last, size=SIZE)
                if "/head/" in request:
                    self._trickle(connection, b"HTTP/1.1 200 OK\r\nX-Long: ")
                connection.sendall(head.encode())
                if request.startswith("HEAD"):
                    continue
                if length > 1:
                    self._trickle(connection, b"")
                connection.sendall(b"x")

    def _trickle(self, connection: socket.socket, first: bytes) -> None:
        self._count(1)
        try:
            connection.sendall(first)
            while True:
                connection.sendall(b"x")
                threading.Event().wait(PAUSE_S)
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self.changed:
            self.open += more
            self.changed.notify_all()


@contextlib.contextmanager
def trickling_store() -> Iterator[TricklingStore]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        store = TricklingStore(listener)
        thread = threading.Thread(target=store.serve)
        thread.start()
        try:
            yield store
        finally:
            store.close()
            thread.join()
