"""A client that means harm, at a running server on both of its ports: what it has fetched, written
and answered for it. Scripts that do: test_script_isolation.py. docs/operate/security.md
names both."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
import requests

from serving.api import routes
from tests.e2e.server import Server
from tests.e2e.stores import SHORT, raw, serving, small
from tests.serving.api.test_framing import AMBIGUOUS, CLEAR
from tests.serving.api.test_http_protocol import LAST, read_all

pytestmark = pytest.mark.slow

INFER, MANAGE = "infer-나", "manage-나"
# Health, and what the server says of itself, not of its models.
OPEN = {
    "/ping",
    "/health",
    "/metrics",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/openapi.json",
}
MANAGING = re.compile(r"^(post|put|delete) /models(/\{name\})?$|^post /v2/repository/models/")
PORTS = ("port", "management_port")


def send(method: str, url: str, headers: dict[str, bytes], body: Any = None) -> requests.Response:
    return requests.request(method, url, headers=headers, json=body, timeout=60)


def bearer(token: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {token}".encode()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("red-team")
    small(folder / "store" / "봄")
    (folder / "비밀.tar.gz").write_text("비밀")
    environment = {"INFERENCE_TOKEN": INFER, "MANAGEMENT_TOKEN": MANAGE}
    environment["HTTPS_HOSTS"] = "models.invalid"
    with serving(folder / "run", folder / "store", **environment) as running:
        yield running


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """Listens, and nobody may come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("port", PORTS)
def test_every_route_but_health_asks_for_its_token(server: Server, port: str) -> None:
    base = f"http://127.0.0.1:{getattr(server, port)}"
    asked, refused = 0, (401,) if port == "port" else (401, 404, 405)  # not all are on both
    for path, methods in routes.document()["paths"].items():
        for method in methods:
            tokens: list[str | None] = [] if path in OPEN else [None, "wrong"]
            tokens += [INFER] * bool(MANAGING.search(f"{method} {path}"))
            for token in tokens:
                answer = send(
                    method,
                    base + path.replace("{name}", "봄").replace("{", "").replace("}", ""),
                    bearer(token) if token else {},
                    SHORT if method in ("post", "put") else None,
                )
                status = answer.status_code
                if status == 424:  # as SageMaker's runtime says it
                    status = answer.json()["OriginalStatusCode"]
                assert status in refused, (method, path, token)
                asked += 1
            if path in OPEN:
                assert send(method, base + path, {}).status_code in (200, *refused[1:])
    assert asked > 60


@pytest.mark.parametrize("port", PORTS)
def test_no_field_has_the_server_fetch_or_read_something_else(
    server: Server, trap: socket.socket, port: str
) -> None:
    base = f"http://127.0.0.1:{getattr(server, port)}"
    host = f"127.0.0.1:{trap.getsockname()[1]}"
    addresses = [
        *(f"{scheme}://{host}/a.tar.gz" for scheme in ("http", "https", "ftp", "s3", "gs", "abfs")),
        *(f"http://models.invalid@{host}/a.tar.gz", f"//{host}/a", f"\\\\{host}\\a"),
        *(f"http://{host}#models.invalid/a.tar.gz", f"http://{host}\\@models.invalid/a.tar.gz"),
        *("file:///etc/passwd", f"file://{host}/etc", "/proc/self/environ", "../비밀.tar.gz"),
    ]
    both = {**bearer(MANAGE), "Content-Type": b"application/json"}
    for address in addresses:
        name = quote(address, safe="")
        answers = [
            send("post", f"{base}/models", both, {"url": address}),
            send("post", f"{base}/models?url={name}", both),
            send("post", f"{base}/v2/repository/models/{name}/load", both, {}),
        ]
        for field in ("model_name", "handler"):  # as it likes, but from nowhere else
            send("post", f"{base}/models", both, {"url": "봄", field: address})
        send("put", f"{base}/models/{name}?url={name}", both)
        calling = {**bearer(INFER), "X-Amzn-SageMaker-Target-Model": address.encode()}
        answers += [
            send("post", f"{base}{path}", calling, body)
            for path, body in (
                ("/invocations", SHORT),
                (f"/predictions/{name}", SHORT),
                (f"/models/{name}/invoke", SHORT),
                (f"/v2/models/{name}/infer", {}),
                (f"/v2/models/{name}/generate", {"text_input": "가"}),
                ("/v1/completions", {"model": address, "prompt": "가"}),
            )
        ]
        assert {answer.status_code // 100 for answer in answers} == {4}, address
        for answer in answers:
            assert "root:" not in answer.text
    told = raw(
        int(base.rpartition(":")[2]),
        f"GET http://{host}/a HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(),
    )
    assert told.startswith(b"HTTP/1.1 4")
    for model in send("get", f"{base}/models", both).json()["models"]:
        send("delete", f"{base}/models/{quote(model['modelName'], safe='')}", both)


@pytest.mark.parametrize("port", PORTS)
def test_no_text_of_a_client_becomes_a_header_or_a_line_of_the_log(
    server: Server, port: str
) -> None:
    base = f"http://127.0.0.1:{getattr(server, port)}"
    hooks = [
        "a\r\nX-Forged: 1\r\n\r\n가",
        'a\n{"level": "error", "message": "forged"}',
        "a\0\x1b[2J",
    ]
    server.forget_log()
    for hook in hooks:
        name = quote(hook, safe="")
        for method, path, body in (
            ("post", f"/predictions/{name}?{name}={name}", SHORT),
            ("post", "/invocations", {"inputs": hook, "parameters": {hook: 1}}),
            ("post", "/v1/completions", {"model": hook, "prompt": hook}),
            ("post", "/models", {"url": hook, "model_name": hook}),
            ("delete", f"/models/{name}", None),
        ):
            for token in (INFER, MANAGE):
                answer = send(method, base + path, bearer(token), body)
                assert "x-forged" not in answer.headers
                assert all(value.isprintable() for value in answer.headers.values())
    for head in (b"X-Request-Id: a\rX-Forged: 1", b"X-Request-Id: a\n b", b"X-Request-Id: \x1b[2J"):
        told = raw(server.port, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
        assert b"forged" not in told.lower().partition(b"\r\n\r\n")[0]
    lines = server.text().splitlines()
    assert len(lines) > len(hooks)
    for line in lines:
        assert json.loads(line)["message"] != "forged"
        assert line.isprintable()


def sent_raw(port: int, sent: bytes) -> bytes:
    """All that comes back until the server closes, which it does when the client has."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return read_all(client)


@pytest.mark.parametrize("port", PORTS)
def test_each_port_refuses_what_ends_in_two_ways(server: Server, port: str) -> None:
    """As the protocol by itself does (test_framing.py); here behind all that a port has."""
    at, cases = getattr(server, port), {**AMBIGUOUS, **CLEAR}
    with ThreadPoolExecutor(8) as pool:  # of the same length: bodies stay as long as they say
        asked = [
            pool.submit(sent_raw, at, (case + LAST).replace(b"/echo", b"/ping"))
            for case in cases.values()
        ]
        answers = dict(zip(cases, (future.result() for future in asked), strict=True))
    for case, answer in answers.items():
        found = re.findall(rb"HTTP/1\.1 (\d+)", answer)
        assert len(found) == 2 if case in CLEAR else found == [b"400"], (case, answer[:300])
