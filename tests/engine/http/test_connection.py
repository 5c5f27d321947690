"""The workers' connection: its requests, and answers whole, in pieces, and broken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.http.connection import MAX_HEAD_BYTES, Connection

WAIT_S = 60.0
KOREAN = '{"text": "가"}'.encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Name: a b \r\n\r\n" % len(KOREAN)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(tmp_path / "s"))
        made.listen()
        yield made


def answered(listener: socket.socket, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """The answer in these pieces, after which the other side closes the connection."""
    connection = Connection(listener.getsockname(), WAIT_S)
    other, _ = listener.accept()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(connection.request, "POST", "/models/%EA%B0%80", KOREAN, WAIT_S)
        sent = b""
        while not sent.endswith(KOREAN):
            sent += other.recv(1000)
        assert sent.startswith(b"POST /models/%EA%B0%80 HTTP/1.1\r\n")
        assert b"\r\ncontent-length: %d\r\n\r\n" % len(KOREAN) in sent
        for piece in pieces:
            other.sendall(piece)
        other.close()
        try:
            return asked.result(WAIT_S)
        finally:
            connection.close()


def test_an_answer_is_whole_however_it_comes(listener: socket.socket) -> None:
    expected = (200, {"content-length": str(len(KOREAN)), "x-name": "a b"}, KOREAN)
    assert answered(listener, HEAD + KOREAN) == expected
    assert answered(listener, *(bytes([byte]) for byte in HEAD + KOREAN)) == expected


@pytest.mark.parametrize(
    "answer",
    [
        HEAD[:-2],
        HEAD + KOREAN[:-1],
        b"HTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
        b"220 ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * MAX_HEAD_BYTES * 2,
    ],
)
def test_a_broken_answer_is_an_error(listener: socket.socket, answer: bytes) -> None:
    with pytest.raises(OSError, match="the answer") as caught:
        answered(listener, answer)
    assert not isinstance(caught.value, ConnectionError)
