"""A client that goes away in the middle of its request."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.stores import LONG, running, serving, slow, text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("disconnect")
    slow(folder / "store" / "느린")
    with serving(folder / "run", folder / "store", WORKERS_PER_MODEL="2") as server:
        yield server


def send(server: Server) -> socket.socket:
    """A client that has sent a long request and not read anything."""
    body = json.dumps(LONG).encode()
    head = (
        "POST /predictions/%EB%8A%90%EB%A6%B0 HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(head.encode() + body)
    return client


def test_its_place_in_the_batch_is_free_at_once(server: Server) -> None:
    client = send(server)
    eventually(lambda: running(server) == 2, 20)

    client.close()

    eventually(lambda: running(server) == 0, 2)


def test_those_that_wait_behind_it_in_the_queue_are_not_worked_on_either(server: Server) -> None:
    clients = [send(server) for _ in range(6)]  # two are worked on, four wait in MMS
    eventually(lambda: running(server) == 4, 20)
    for client in clients:
        client.close()
    eventually(lambda: running(server) == 0, 2)

    began = time.monotonic()
    short = {"inputs": "오늘은", "parameters": {"max_new_tokens": 2}}
    assert text(server.predict("느린", short))
    assert time.monotonic() - began < 5


def test_the_model_can_be_unloaded_right_away(server: Server, tmp_path: Path) -> None:
    client = send(server)
    eventually(lambda: running(server) == 2, 20)
    client.close()
    began = time.monotonic()
    assert server.unload("느린").status_code == 200
    assert time.monotonic() - began < 5
