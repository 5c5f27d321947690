"""The limits of a script's output hold for what the server's log has of it."""

from __future__ import annotations

import io
import json
import re

import pytest

from handlers.user_code.output import BURST_BYTES, BYTES_PER_S, LINE_BYTES, MAX_LINE_BYTES, Output

NAME = "시/가을"
COUNT = BURST_BYTES // LINE_BYTES  # of lines, more than fit
CONTROLS = re.compile(r"[\x7f-\x9f]")


class Log:
    """The worker's log, and what Multi Model Server makes of it, on a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.written = bytearray()
        self.output = Output(self.written.extend, lambda: self.now)

    def print(self, content: bytes) -> None:
        """Copies the output of one process."""
        self.output.copy(io.BytesIO(content), NAME)

    def lines(self) -> list[str]:
        """The lines as Java's reader has them."""
        return re.split("\r\n|[\r\n\x85\u2028\u2029]", self.written.decode())[:-1]

    def logged_bytes(self) -> int:
        texts = [json.dumps(line, ensure_ascii=False)[1:-1] for line in self.lines()]
        return sum(LINE_BYTES + len(CONTROLS.sub(r"\\u0000", text).encode()) for text in texts)


@pytest.mark.parametrize(
    "piece",
    [
        b"a\n",
        b"a\r",
        "봄\u2028\u2029".encode(),
        b"\x01",
        b"\x7f\xc2\x80",
        b"\xff",
        b'"\\',
        "가\n".encode(),
        "시".encode(),
    ],
    ids=[
        "lines",
        "returns",
        "separators",
        "controls",
        "more controls",
        "no UTF-8",
        "quotes",
        "Korean",
        "long",
    ],
)
def test_no_output_takes_more_of_the_log_than_its_limit(piece: bytes) -> None:
    log, seconds = Log(), 5
    is_line = piece.endswith((b"\n", b"\r", "\u2029".encode()))
    much = piece * (BURST_BYTES // (LINE_BYTES if is_line else len(piece)))
    log.print(2 * much)
    for _ in range(seconds):
        log.now += 1
        log.print(much[: len(much) // 8])
    allowed = BURST_BYTES + seconds * BYTES_PER_S
    assert 0.85 * allowed < log.logged_bytes() <= allowed
    assert all(line.startswith(f"{NAME}: ") for line in log.lines())


def test_processes_that_end_at_each_request_share_a_limit() -> None:
    log = Log()
    for _ in range(5):
        log.print(b"x" * 50 * MAX_LINE_BYTES)
    assert log.logged_bytes() <= BURST_BYTES


def test_what_is_dropped_is_counted_once_there_is_room() -> None:
    log = Log()
    log.print("봄\n".encode() * COUNT)
    lines = log.lines()
    assert set(lines) == {f"{NAME}: 봄"}
    log.now += 1
    log.print("가을\r\n\r\n겨울".encode())
    note, *after = log.lines()[len(lines) :]
    assert f"{(COUNT - len(lines)) * len('봄'.encode())} bytes of output were dropped" in note
    assert after == [f"{NAME}: 가을", f"{NAME}: 겨울"]
