"""An object store's emulator, as a process of its own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

START_S = 60


@contextmanager
def emulator(command: Sequence[str], port_option: str) -> Iterator[int]:
    """Starts it; the port at which it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = subprocess.Popen([*command, port_option, str(port)])
    try:
        end = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()
