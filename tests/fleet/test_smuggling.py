"""A proxy and the gateway see the same number of requests in a client's bytes."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import serving
from tests.fleet.envoy import Envoy, needs_envoy
from tests.fleet.haproxy import HAProxy, needs_haproxy
from tests.serving.api.test_framing import AMBIGUOUS, CLEAR, HIDDEN, HOST

pytestmark = pytest.mark.slow

# Both proxies let it through, and it is as long as the one of the cases.
PATH = b"/v1/x"
LAST = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
HEAD_IN_PATH = "봄%0d%0aContent-Length:%2099%0d%0a%0d%0aPOST%20/v1/x%20HTTP/1.1%0d%0a"
IN_TARGETS = {
    f"{place}-{what}": b"POST %s HTTP/1.1\r\n" % (target % hidden).encode()
    + HOST
    + b"\r\n"
    + HIDDEN
    for place, target in {
        "path": "/predictions/%s",
        "query": "/invocations?model_name=%s",
        "absolute": "http://b/predictions/%s",
    }.items()
    for what, hidden in {"encoded": HEAD_IN_PATH.replace("봄", "%EB%B4%84"), "plain": "a"}.items()
}
# A case whose body is a whole request, without an id.
CASES = {**AMBIGUOUS, **CLEAR, **IN_TARGETS}
del CASES["a-body-like-a-request"]
IDLE_S = 10.0  # without an answer: then the proxy waits for the rest of a body, which never comes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "store").mkdir()
    with serving(folder, folder / "store", ALLOWED_HOSTS="*") as running:
        yield running


def sent(port: int, data: bytes) -> bytes:
    """The answer until the proxy closes the connection or waits for more."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=IDLE_S) as client:
        client.sendall(data)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while piece := client.recv(65_536):
                answer += piece
    return answer


@pytest.mark.parametrize(
    "kind", [pytest.param(HAProxy, marks=needs_haproxy), pytest.param(Envoy, marks=needs_envoy)]
)
def test_one_request_never_becomes_two(
    server: Server, tmp_path: Path, kind: type[HAProxy | Envoy]
) -> None:
    with kind(tmp_path, [f"127.0.0.1:{server.port}"] * 3) as proxy:
        answers = {}
        with ThreadPoolExecutor(len(CASES)) as pool:
            for case, data in CASES.items():
                named = HOST + f"X-Request-Id: {kind.__name__}-{case}\r\n".encode()
                whole = (data.replace(b"/echo", PATH) + LAST).replace(HOST, named)
                answers[case] = pool.submit(sent, proxy.port, whole)
        marker = {"x-request-id": f"{kind.__name__}-end"}
        requests.get(proxy.url("/v1/models"), headers=marker, timeout=60)
    eventually(lambda: marker["x-request-id"] in server.text())
    lines = [line for line in server.text().splitlines() if '"request_id"' in line]
    seen = Counter(json.loads(line)["request_id"] for line in lines)
    for case, future in answers.items():
        answer, id = future.result(), f"{kind.__name__}-{case}"
        echoed = re.findall(rf"(?i)\r\nx-request-id: ({kind.__name__}[^\r]*)".encode(), answer)
        # Every request that was taken has one answer, at its own client.
        assert {i.decode() for i in echoed} <= {id}, (case, answer)
        assert seen[id] <= len(re.findall(rb"HTTP/1\.\d \d", answer)), (case, answer)
    assert all(seen[f"{kind.__name__}-{case}"] for case in ("tab", "extension", "upper-case"))
