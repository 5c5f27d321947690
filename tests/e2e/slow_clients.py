"""Clients that send a byte a second and never finish a request's head.

python -m tests.e2e.slow_clients http://127.0.0.1:8080/predictions/sowol --slow 1000

prints the latency of a normal client without and beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import requests

HEAD = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"a" * 10_000


class SlowClients:
    """`count` connections; one that is closed is opened again. `refused` counts those."""

    def __init__(self, port: int, count: int, pause_s: float = 1.0) -> None:
        self._port, self._count, self._pause_s = port, count, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.open = self.refused = 0
        self.answers: set[bytes] = set()  # first lines of what they were told

    def _run(self) -> None:
        sent: dict[socket.socket, int] = {}
        with selectors.DefaultSelector() as ready:
            while not self._stop.is_set():
                while len(sent) < self._count and not self._stop.is_set():
                    client = socket.create_connection(("127.0.0.1", self._port))
                    client.setblocking(False)
                    ready.register(client, selectors.EVENT_READ)
                    sent[client] = 0
                self.open = len(sent)
                for client in list(sent):
                    with contextlib.suppress(OSError):
                        client.send(HEAD[sent[client] : sent[client] + 1])
                        sent[client] += 1
                for key, _ in ready.select(self._pause_s):
                    client = key.fileobj  # type: ignore[assignment]
                    with contextlib.suppress(OSError):
                        self.answers.add(client.recv(65_536).split(b"\r\n")[0])
                    ready.unregister(client)
                    client.close()
                    del sent[client]
                    self.refused += 1
                self._stop.wait(self._pause_s)
            for client in sent:
                client.close()

    def __enter__(self) -> SlowClients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def many_files(count: int) -> Iterator[None]:
    """Lets this process open so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 1024, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def latencies(url: str, calls: int) -> list[float]:
    """Seconds of a normal client's calls, one after the other, each on a new connection."""
    body = json.dumps({"inputs": "나는", "parameters": {"max_new_tokens": 1}}).encode()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        answer = requests.post(
            url, data=body, headers={"Content-Type": "application/json"}, timeout=60
        )
        times.append(time.perf_counter() - began)
        assert answer.status_code == 200, answer.text
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="What slow clients cost the others.")
    parser.add_argument("url")
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=1000)
    given = parser.parse_args()
    latencies(given.url, 50)

    def shown(name: str) -> None:
        times = [1000 * seconds for seconds in latencies(given.url, given.calls)]
        p99 = statistics.quantiles(times, n=100)[98]
        print(f"{name}: p50 {statistics.median(times):.2f} ms, p99 {p99:.2f} ms")

    shown("alone")
    with many_files(given.slow), SlowClients(urlsplit(given.url).port or 80, given.slow) as slow:
        while slow.open < given.slow:
            time.sleep(0.1)
        shown(f"beside {given.slow}")
        print(f"connections closed by the server: {slow.refused}, told {slow.answers}")
    shown("alone")


if __name__ == "__main__":
    main()
