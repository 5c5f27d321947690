"""A store over HTTP that sends a byte at a time, as long as somebody reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tests.serving.store.file_host import FileHandler, FileHost, running

PAUSE_S = 0.02
SIZE = 8 << 20


class TricklingStore(FileHost):
    """`url` leads to archives: under `head/` an answer's head does not end, under `body/` its body.

    `open` counts the answers that are being sent.
    """

    request_queue_size = 256
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.address}"
        self.open = 0
        self.changed = threading.Condition()
        self.closing = threading.Event()

    def wait_until(self, count: int) -> None:
        """Until so many answers are being sent."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.open == count, 60), self.open

    def count(self, more: int) -> None:
        with self.changed:
            self.open += more
            self.changed.notify_all()


class Handler(FileHandler):
    server: TricklingStore

    def do_HEAD(self) -> None:
        self._start(0, SIZE - 1)

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", f"bytes=0-{SIZE - 1}").removeprefix("bytes=")
        first, last = map(int, wanted.split("-"))
        self._start(first, last)
        if last > first:
            self._trickle(b"")
        self.wfile.write(b"x")

    def _start(self, first: int, last: int) -> None:
        """Sends an answer's head."""
        if self.path.startswith("/head/"):
            self._trickle(b"HTTP/1.1 200 OK\r\nX-Long: ")
        part = {"Content-Range": f"bytes {first}-{last}/{SIZE}"}
        length = {"Content-Length": str(last - first + 1)}
        self.send(206 if "Range" in self.headers else 200, headers={**part, **length})

    def _trickle(self, first: bytes) -> None:
        """Sends a byte now and then until the client is gone or the store is closed."""
        self.server.count(1)
        try:
            self.wfile.write(first)
            while not self.server.closing.wait(PAUSE_S):
                self.wfile.write(b"x")
            raise ConnectionError("the store is closed")
        finally:
            self.server.count(-1)


@contextlib.contextmanager
def trickling_store() -> Iterator[TricklingStore]:
    store = TricklingStore()
    with running(store):
        try:
            yield store
        finally:
            store.closing.set()  # whoever reads its answers would keep its process from ending
