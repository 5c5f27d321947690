"""Measures a body of many JSON lines: its lines a second, and the server's memory along it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.run import seconds_of
from testbed.process import ProgramError
from testbed.process_tree import memory
from testbed.server import Server, refused

LINES = "application/jsonlines"
SAMPLES = 20  # of the memory, after equal parts of the lines
SENT_BYTES = 64 << 10  # at a time


def measure(server: Server, model: str, text: str, lines: int) -> dict[str, Any]:
    """Return the seconds of a batch, and the memory of all processes after each part of it.

    Each line's request is for one token. The body is sent while the answer is read. Raises
    `ProgramError`.
    """
    body = {"inputs": text, "parameters": {"max_new_tokens": 1}}
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
                if b'"generated_text"' not in (received := answer.readline()):
                    raise ProgramError(f"line {number} of {path} is answered {received!r:.300}")
                if number * SAMPLES % lines < SAMPLES:
                    after.append(memory(server.pid))
            answer.read()

        seconds = seconds_of(read)
        sending.join()
    return {"lines": lines, "seconds": seconds, "after": after}


def _chunks(line: bytes, lines: int) -> Iterator[bytes]:
    """Yield the chunks of a body of `lines` times the same line."""
    at_once = max(SENT_BYTES // len(line), 1)
    while lines:
        data = line * min(at_once, lines)
        lines -= min(at_once, lines)
        yield b"%x\r\n%b\r\n" % (len(data), data)
    yield b"0\r\n\r\n"
