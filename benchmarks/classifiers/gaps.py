"""Measures the gaps between the tokens of streams beside a list of texts to classify."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from benchmarks.report.tables import Results
from testbed.process import ProgramError
from testbed.server import Server, call, stream

STREAMS = 2  # at the same time
BEGINS_S = 60.0  # within which a list has a result, and a stream two tokens


@dataclass(frozen=True)
class Case:
    """Streams of a model for so many seconds, and the texts of the list beside them."""

    server: Server
    generator: str
    prompt: str
    texts: Sequence[str]
    new_tokens: int
    seconds: float


def measure(case: Case, classifier: str | None) -> Results:
    """Measure gaps in seconds, alone or beside a list, and the list's texts a second.

    The list begins before, is sent again where it ends too early, and is cut off at the end.
    """
    stop, gaps = threading.Event(), list[float]()
    threads: list[threading.Thread] = []
    errors: list[str] = []

    def start(work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except (OSError, http.client.HTTPException, ProgramError) as error:
                if not stop.is_set():
                    errors.append(str(error))

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    count, seconds = 0, 0.0
    with contextlib.closing(case.server.connect()) as connection:
        if classifier is not None:
            path, body = f"/predictions/{quote(classifier)}", {"inputs": case.texts}
            start(lambda: _repeat(stop, lambda: call(connection, path, body)))
            before = _classified(case, classifier)
            _wait(lambda: _classified(case, classifier) > before)
        for _ in range(STREAMS):
            start(lambda: _repeat(stop, lambda: _stream(case, stop, gaps)))
        _wait(lambda: len(gaps) >= STREAMS or bool(errors))
        first = len(gaps)
        if classifier is not None:
            before = _classified(case, classifier)
        began = time.perf_counter()
        time.sleep(case.seconds)
        if classifier is not None:
            count = _classified(case, classifier) - before
        seconds = time.perf_counter() - began
        stop.set()
        for thread in threads[-STREAMS:]:
            thread.join()
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    if errors or not gaps[first:]:
        raise ProgramError(errors[0] if errors else f"{case.generator} made no token")
    return {"gaps_s": gaps[first:], "texts_per_s": count / seconds}


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + BEGINS_S
    while not until() and time.monotonic() < end:
        time.sleep(0.01)


def _repeat(stop: threading.Event, work: Callable[[], object]) -> None:
    while not stop.is_set():
        work()


def _classified(case: Case, model: str) -> int:
    rows = case.server.ask_engine("/statistics")["models"]
    (count,) = (row["texts"] for row in rows if row["name"].rpartition("#")[0] == model)
    return int(count)


def _stream(case: Case, stop: threading.Event, gaps: list[float]) -> None:
    """Add the seconds between the tokens of a stream, until it ends or `stop` is set."""
    parameters = {"max_new_tokens": case.new_tokens}
    body = {"inputs": case.prompt, "parameters": parameters, "stream": True}
    path, last = f"/predictions/{quote(case.generator)}", 0.0
    with contextlib.closing(case.server.connect()) as connection:
        for line in stream(connection, path, body):
            if stop.is_set():
                return
            if b'"token"' in line:
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
