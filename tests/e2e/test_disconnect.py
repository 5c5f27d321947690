"""A client that goes away in the middle of its request."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.stores import ENDLESS, ENDLESS_TOKENS, endless, running, steps, text

FEW = ENDLESS_TOKENS / 2  # steps: fewer than a request needs


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    endless(clean.store / "느린")
    assert clean.load("느린", initial_workers=2).status_code == 200
    return clean


def send(server: Server) -> socket.socket:
    """A client that has sent a long request and not read anything."""
    body = json.dumps(ENDLESS).encode()
    head = (
        "POST /predictions/%EB%8A%90%EB%A6%B0 HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(head.encode() + body)
    return client


def test_its_place_in_the_batch_is_free_at_once(server: Server) -> None:
    client = send(server)
    eventually(lambda: running(server) == 2)

    begun = steps(server, "느린")

    client.close()

    eventually(lambda: running(server) == 0)
    assert steps(server, "느린") - begun < FEW


def test_those_that_wait_behind_it_in_the_queue_are_not_worked_on_either(server: Server) -> None:
    clients = [send(server) for _ in range(6)]  # two are worked on, four wait in MMS
    eventually(lambda: running(server) == 4)
    begun = steps(server, "느린")
    for client in clients:
        client.close()
    eventually(lambda: running(server) == 0)

    short = {"inputs": "오늘은", "parameters": {"max_new_tokens": 2}}
    assert text(server.predict("느린", short))
    assert steps(server, "느린") - begun < FEW


def test_the_model_can_be_unloaded_right_away(server: Server, tmp_path: Path) -> None:
    client = send(server)
    eventually(lambda: running(server) == 2)
    client.close()
    assert server.unload("느린").status_code == 200
