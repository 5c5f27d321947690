"""Tokens, limits, and a client that means harm at both ports of a running server: what it has
fetched, written and answered for it. Scripts that do: test_script_isolation.py.
tests/test_security_page.py names both."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
import requests
from onnx import TensorProto

from tests.e2e.server import Server
from tests.e2e.stores import (
    SHORT,
    bearer,
    error,
    every_call,
    raw,
    serving,
    small,
    status_of,
    text,
)
from tests.handlers.tensors.graphs import identity

INFER, MANAGE = "infer-나", "manage-나"
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIA-SECRET-1",
    "AWS_SECRET_ACCESS_KEY": "SECRET-2",
    "AWS_SESSION_TOKEN": "SECRET-3",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/SECRET-4",
    "HF_TOKEN": "SECRET-5",
    "ORDERS_DATABASE": "postgres://me:SECRET-6@db/orders",
    "비밀번호": "SECRET-7",
}
LIMIT = 20_000
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
BOTH_PORTS = pytest.mark.parametrize("management", [False, True])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("red-team")
    small(folder / "store" / "봄")
    small(folder / "store" / "b", 1)
    identity(folder / "store" / "시" / "model.onnx", TensorProto.STRING, ["n"])
    (folder / "비밀.tar.gz").write_text("비밀")
    environment = {"INFERENCE_TOKEN": INFER, "MANAGEMENT_TOKEN": MANAGE}
    environment |= {"HTTPS_HOSTS": "models.invalid", "MAX_REQUEST_BYTES": str(LIMIT)}
    with serving(
        folder / "run", folder / "store", **environment, **SECRETS, PRELOAD_MODELS="봄"
    ) as running:
        yield running


def test_each_token_opens_what_is_its_own(server: Server) -> None:
    """What no token or another one opens: the next test."""
    for management in (False, True):
        ask = functools.partial(server.request, management=management)
        for method, path in (
            ("post", "/models?url=b"),
            ("put", "/models/b?min_worker=2"),
            ("delete", "/models/b"),
        ):
            refused = ask(method, path, headers=bearer(INFER))
            assert error(refused) == (401, "UnauthorizedException")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert ask(method, path, headers=bearer(MANAGE)).status_code == 200
        for token, status in (
            (f"Bearer {MANAGE}", 200),
            (f"bearer  {INFER}", 200),
            (INFER, 401),
            (f"Basic {INFER}", 401),
        ):
            headers = {"Authorization": token.encode()}
            for path in ("/models", "/models/봄", "/models?available=true"):
                assert ask("get", path, headers=headers).status_code == status, (token, path)
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["가"]}
    for path, body in (
        ("/predictions/봄", SHORT),
        ("/models/봄/invoke", SHORT),
        ("/invocations?model_name=봄", SHORT),
        ("/v2/models/시/infer", {"inputs": [tensor]}),
    ):
        for token, status in ((MANAGE, 401), (INFER, 200)):
            answer = server.post(path, json=body, headers=bearer(token))
            assert answer.status_code == status


def test_a_body_that_is_too_large_is_413(server: Server) -> None:
    body = json.dumps({"inputs": "가" * LIMIT}).encode()
    headers: Any = {**bearer(INFER), "Content-Type": b"application/json"}
    answer = server.predict("봄", body, **headers)
    assert error(answer) == (413, "RequestTooLargeException")
    assert str(LIMIT) in answer.json()["message"]
    pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
    chunked = server.post("/predictions/봄", data=pieces, headers=headers)
    assert error(chunked) == (413, "RequestTooLargeException")
    load = server.post("/models", data=body, headers=bearer(MANAGE))
    assert error(load) == (413, "RequestTooLargeException")
    fits = json.dumps(SHORT).encode().ljust(LIMIT)
    assert text(server.predict("봄", fits, **headers))


def test_an_announced_length_is_refused_before_the_body_comes(server: Server) -> None:
    head = f"POST /predictions/x HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {INFER}\r\n"
    answer = raw(server.port, f"{head}Content-Length: 999999999999\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413")


def test_workers_know_no_credentials(server: Server) -> None:
    words = ("model_service_worker", "handlers.host", "ModelServer")
    processes = [process for word in words for process in server.descendants(word)]
    assert len(processes) >= 3
    for process in processes:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode()
        for value in (*SECRETS.values(), INFER, MANAGE):
            assert value not in environment
    gateway = server.descendants("serving.gateway")[0]
    assert SECRETS["AWS_SECRET_ACCESS_KEY"] in gateway.environ().values()


def test_only_the_gateway_listens_to_the_network(server: Server) -> None:
    listening = {
        process.pid: {c.laddr.port for c in process.net_connections("inet") if c.status == "LISTEN"}
        for process in server.descendants()
    }
    gateway = server.descendants("serving.gateway")[0].pid
    assert listening.pop(gateway) == {server.port, server.management_port}
    assert {port for ports in listening.values() for port in ports} == set()
    java = server.descendants("ModelServer")[0]
    assert not [c for c in java.net_connections("inet") if c.type == socket.SOCK_DGRAM]


def test_other_users_cannot_reach_the_sockets(server: Server) -> None:
    sockets = [path for path in server.run_dir.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]
    assert {"mms.sock", "engine.sock"} <= {path.name for path in sockets}
    # Connecting needs the right to write.
    assert not [path for path in sockets if path.stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("uid", "connects"), [(0, True), (54_321, False)])
def test_another_user_cannot_connect(server: Server, uid: int, connects: bool) -> None:
    # By the open folder: those above it are pytest's, and closed to other users.
    folder = os.open(server.run_dir, os.O_PATH)
    for name in ("mms.sock", "engine.sock"):
        if (child := os.fork()) == 0:
            try:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
                socket.socket(socket.AF_UNIX).connect(f"/proc/self/fd/{folder}/{name}")
                os._exit(0)
            except PermissionError:
                os._exit(1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if connects else 1)
    os.close(folder)


def test_the_secret_of_the_probe_is_not_told(server: Server) -> None:
    worker = psutil.Process(server.descendants("model_service_worker")[0].pid)
    secret = worker.environ()["PROBE_SECRET"]
    headers = {**bearer(INFER), "x-kogpt2-probe": secret.encode()}
    answer = server.post("/predictions/봄", json=SHORT, headers=headers)
    assert text(answer)  # a client's copy goes nowhere
    assert secret not in server.text()
    for value in (*SECRETS.values(), INFER, MANAGE):
        assert value not in server.text()


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """Listens, and nobody may come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


@BOTH_PORTS
def test_every_route_but_health_asks_for_its_token(server: Server, management: bool) -> None:
    ask = functools.partial(server.request, management=management)
    asked, refused = 0, (401, 404, 405) if management else (401,)  # not all are on both
    for method, route, path, body in every_call("봄"):
        tokens: list[str | None] = [] if path in OPEN else [None, "wrong"]
        tokens += [INFER] * bool(MANAGING.search(f"{method} {route}"))
        for token in tokens:
            answer = ask(method, path, headers=bearer(token) if token else {}, json=body)
            assert status_of(answer) in refused, (method, path, token)
            asked += 1
        if path in OPEN:
            assert ask(method, path).status_code in (200, *refused[1:])
    assert asked > 60


@BOTH_PORTS
def test_no_field_has_the_server_fetch_or_read_something_else(
    server: Server, trap: socket.socket, management: bool
) -> None:
    def ask(method: str, path: str, headers: Any, body: Any = None) -> requests.Response:
        return server.request(method, path, management=management, headers=headers, json=body)

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
            ask("post", "/models", both, {"url": address}),
            ask("post", f"/models?url={name}", both),
            ask("post", f"/v2/repository/models/{name}/load", both, {}),
        ]
        for field in ("model_name", "handler"):  # as it likes, but from nowhere else
            ask("post", "/models", both, {"url": "봄", field: address})
        ask("put", f"/models/{name}?url={name}", both)
        calling = {**bearer(INFER), "X-Amzn-SageMaker-Target-Model": address.encode()}
        answers += [
            ask("post", path, calling, body)
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
        server.management_port if management else server.port,
        f"GET http://{host}/a HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(),
    )
    assert told.startswith(b"HTTP/1.1 4")
    for model in ask("get", "/models", both).json()["models"]:
        ask("delete", f"/models/{quote(model['modelName'], safe='')}", both)


@BOTH_PORTS
def test_no_text_of_a_client_becomes_a_header_or_a_line_of_the_log(
    server: Server, management: bool
) -> None:
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
                sent = {"headers": bearer(token), "json": body}
                answer = server.request(method, path, management=management, **sent)
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
