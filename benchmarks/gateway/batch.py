"""Measures a body of many JSON lines: its lines a second, and the server's memory along it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.report.tables import Results, Row, mb
from benchmarks.run import seconds_of
from testbed.process import ProgramError
from testbed.process_tree import memory
from testbed.server import Server, refused

LINES = "application/jsonlines"
SAMPLES = 20  # of the memory, after equal parts of the lines
KINDS = {"the gateway": "gateway", "the engine": "engine", "all but MMS": "", "MMS": "MMS"}
SENT_BYTES = 64 << 10  # at a time


def measure(
    server: Server, model: str, body: Mapping[str, Any], answered: bytes, lines: int
) -> Results:
    """Return the seconds of a batch, and the memory of all processes after each part of it.

    Each line is `body`, each answer has `answered`. The body is sent while the answer is read.
    Raises `ProgramError`.
    """
    line = json.dumps(body, ensure_ascii=False).encode() + b"\n"
    path, after = f"/predictions/{model}", []
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("POST", path)
        for name, value in (("Content-Type", LINES), ("Transfer-Encoding", "chunked")):
            connection.putheader(name, value)
        connection.endheaders()

        def send() -> None:
            with contextlib.suppress(OSError):  # the answer below has the reason
                for chunk in _chunks(line, lines):
                    connection.send(chunk)

        sending = threading.Thread(target=send)
        sending.start()

        def read() -> None:
            answer = connection.getresponse()
            if answer.status != 200:
                raise refused(answer, path, answer.read())
            for number in range(1, lines + 1):
                if answered not in (received := answer.readline()):
                    raise ProgramError(f"line {number} of {path} is answered {received!r:.300}")
                if number * SAMPLES % lines < SAMPLES:
                    after.append(memory(server.pid))
            answer.read()

        seconds = seconds_of(read)
        sending.join()
    return {"lines": lines, "seconds": seconds, "after": after}


def _sizes(measured: Results, kind: str = "") -> list[int]:
    """Return RSS along a batch of one kind of process, or of all but MMS.

    MMS's Java heap grows up to its limit with any requests. PSS would depend on other servers.
    """
    samples = [after["by_kind"] for after in measured["after"]]
    names = [kind] if kind else [name for name in samples[0] if name != "MMS"]
    return [sum(by_kind[name]["rss"] for name in names) for by_kind in samples]


def growth_percent(measured: Results) -> list[float]:
    """Return the growth from a tenth of the lines to the largest size after."""
    sizes = _sizes(measured)
    before, *after = sizes[len(sizes) // 10 - 1 :]
    return [100 * (max(after) / before - 1)]


def rows(measured: Results) -> Iterator[Row]:
    count = measured["lines"]
    yield f"a batch of {count:,} lines, lines/s", f"{count / measured['seconds']:,.0f}"
    for what, kind in KINDS.items():
        along = _sizes(measured, kind)
        ends = (mb(size) for size in (along[len(along) // 10 - 1], along[-1]))
        yield f"RSS of {what} after a tenth of them and after all, MB", " and ".join(ends)


def _chunks(line: bytes, lines: int) -> Iterator[bytes]:
    """Yield the chunks of a body of `lines` times the same line."""
    at_once = max(SENT_BYTES // len(line), 1)
    while lines:
        data = line * min(at_once, lines)
        lines -= min(at_once, lines)
        yield b"%x\r\n%b\r\n" % (len(data), data)
    yield b"0\r\n\r\n"
