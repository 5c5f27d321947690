"""MMS's messages to a worker (com.amazonaws.ml.mms.util.codec.ModelRequestEncoder)."""

from __future__ import annotations

import socket
import struct
from pathlib import Path


def load_message(name: str, folder: Path, handler: str, io_name: str = "io") -> bytes:
    message = b"L" + _sized(name) + _sized(str(folder)) + struct.pack("!i", 1)
    return message + _sized(handler) + struct.pack("!i", -1) + _sized(io_name)


def request_message(body: bytes) -> bytes:
    message = b"I" + _sized("id") + struct.pack("!i", -1) + _sized("body")
    message += _sized("application/octet-stream") + struct.pack("!i", len(body)) + body
    return message + struct.pack("!ii", -1, -1)


def worker_arguments(path: Path, name: str, folder: Path, handler: str) -> list[str]:
    """Return the arguments of the program that MMS starts for a model, which listens on `path`."""
    arguments = {"sock-type": "unix", "sock-name": path, "handler": handler, "model-path": folder}
    arguments |= {"model-name": name, "preload-model": "false"}
    return [text for name, value in arguments.items() for text in (f"--{name}", str(value))]


def ask(connection: socket.socket, message: bytes) -> bytes:
    connection.sendall(message)
    return connection.recv(1 << 16)


def _sized(text: str) -> bytes:
    return struct.pack("!i", len(text.encode())) + text.encode()
