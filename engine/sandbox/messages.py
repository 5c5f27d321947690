"""Messages between the engine and a sandbox: a length of four bytes, then JSON."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<I")


def send(connection: socket.socket, message: Any) -> None:
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket, max_bytes: int, deadline: float | None = None) -> Any:
    """Return the next message.

    Raises `ConnectionError` if the other end is closed, `TimeoutError` at the deadline (of
    `time.monotonic`), and `ValueError` for a message that is too long or not JSON.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    if length > max_bytes:
        raise ValueError(f"an answer of {length} bytes, more than {max_bytes}")
    try:
        return json.loads(_read(connection, length, deadline))
    except RecursionError:
        raise ValueError("an answer that is nested too deeply") from None


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            connection.settimeout(remaining_s)
        chunk = connection.recv(min(size - len(content), 1 << 20))
        if not chunk:
            raise ConnectionError("the other end is closed")
        content += chunk
    return bytes(content)
