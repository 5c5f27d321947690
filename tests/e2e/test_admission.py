"""More requests than a server can answer in time: none is answered late or worked on in vain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import ENDLESS, SHORT, count, endless, running, small, text

pytestmark = pytest.mark.slow

CLIENTS, AT_ONCE, LIMIT_S = 64, 16, 3  # within which sixteen requests begin


# An answer is in time if the gateway has it in time. The log's seconds end when it is written,
# which a busy machine delays; a request that is worked on in vain goes on for seconds.
@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    endless(clean.store / "느린")
    small(clean.store / "빠른")
    assert clean.load("느린", response_timeout=LIMIT_S).status_code == 200
    assert clean.load("빠른").status_code == 200
    return clean


def crowd(server: Server, body: dict[str, Any]) -> list[requests.Response]:
    """64 clients at once; every fourth reads a stream."""

    def ask(number: int) -> requests.Response:
        sent = {**body, "stream": True} if number % 4 == 0 else body
        return server.predict("느린", sent, **{"x-request-id": f"{id(body)}-{number}"})

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, range(CLIENTS)))


def test_nobody_is_answered_after_its_deadline_and_nothing_is_worked_on_after_it(
    server: Server,
) -> None:
    before = count(server, "requests", "느린")
    answers = crowd(server, ENDLESS)
    eventually(lambda: running(server) == 0)
    steps = count(server, "steps", "느린")
    streams = [a for a in answers if a.status_code == 200]  # they had begun, and ended in an error
    assert all('"error": {"code": 504' in a.text for a in streams)
    odd = [a.text for a in answers if a.status_code not in (200, 429, 504)]
    assert odd == []
    begun = count(server, "requests", "느린") - before
    refused = sum(a.status_code == 429 for a in answers)
    assert AT_ONCE <= begun <= CLIENTS - refused  # those did not come as far as the engine
    assert count(server, "steps", "느린") == steps
    assert text(server.predict("빠른", SHORT))


def test_sixteen_clients_of_a_default_server_share_a_step(server: Server) -> None:
    # Steps that take longer than a client of this process needs to ask again.
    assert server.load("열여섯", "느린").status_code == 200
    body = {"inputs": "나는 오늘", "parameters": {"max_new_tokens": 300, "temperature": 0.01}}
    assert text(server.predict("열여섯", body))
    before = [count(server, what, "열여섯") for what in ("rows", "steps")]
    with ThreadPoolExecutor(16) as pool:
        for answer in pool.map(lambda _: server.predict("열여섯", body), range(32)):
            assert text(answer)
    after = [count(server, what, "열여섯") for what in ("rows", "steps")]
    rows, steps = (a - b for a, b in zip(after, before, strict=True))
    assert rows / steps > 8  # with eight workers it cannot be
