"""Tokens, limits, and what a model's worker can see and reach."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from onnx import TensorProto

from tests.e2e.server import Server
from tests.e2e.stores import SHORT, error, raw, serving, small, text
from tests.handlers.tensors.graphs import identity

SECRETS = {
    "MANAGEMENT_TOKEN": "manage-비밀",
    "INFERENCE_TOKEN": "infer-me",
    "AWS_ACCESS_KEY_ID": "AKIA-SECRET-1",
    "AWS_SECRET_ACCESS_KEY": "SECRET-2",
    "AWS_SESSION_TOKEN": "SECRET-3",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/SECRET-4",
    "HF_TOKEN": "SECRET-5",
    "ORDERS_DATABASE": "postgres://me:SECRET-6@db/orders",
    "비밀번호": "SECRET-7",
}
LIMIT = 20_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("security")
    for seed, name in enumerate(("a", "b")):
        small(folder / "store" / name, seed)
    identity(folder / "store" / "시" / "model.onnx", TensorProto.STRING, ["n"])
    environment = {**SECRETS, "MAX_REQUEST_BYTES": str(LIMIT), "PRELOAD_MODELS": "a"}
    with serving(folder, folder / "store", **environment) as running:
        yield running


def bearer(token: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {token}".encode()}


MANAGE, INFER = bearer(SECRETS["MANAGEMENT_TOKEN"]), bearer(SECRETS["INFERENCE_TOKEN"])


@pytest.mark.parametrize("port", ["port", "management_port"])
def test_loading_and_unloading_need_the_management_token(server: Server, port: str) -> None:
    base = f"http://127.0.0.1:{getattr(server, port)}/models"
    wrong: list[dict[str, bytes]] = [{}, bearer("wrong"), INFER, {"Authorization": b"Basic eA=="}]
    for headers in wrong:
        for method, url in (
            ("post", f"{base}?url=b"),
            ("put", f"{base}/a?min_worker=1"),
            ("delete", f"{base}/a"),
        ):
            answer = requests.request(method, url, headers=headers, timeout=60)
            assert error(answer) == (401, "UnauthorizedException")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert requests.post(f"{base}?url=b", headers=MANAGE, timeout=60).status_code == 200
    scaled = requests.put(f"{base}/b?min_worker=2", headers=MANAGE, timeout=60)
    assert scaled.status_code == 200
    assert requests.delete(f"{base}/b", headers=MANAGE, timeout=60).status_code == 200


def test_the_open_inference_protocol_needs_the_inference_token(server: Server) -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["가"]}
    asked = [("post", "infer"), ("get", ""), ("get", "ready")]
    for headers, statuses in (({}, [401] * 3), (bearer("wrong"), [401] * 3), (INFER, [200] * 3)):
        answers = [
            requests.request(
                method,
                server.url(f"/v2/models/시/{path}".rstrip("/")),
                json={"inputs": [tensor]} if method == "post" else None,
                headers=headers,
                timeout=30,
            )
            for method, path in asked
        ]
        assert [answer.status_code for answer in answers] == statuses
    assert answers[0].json()["outputs"][0]["data"] == ["가"]


def test_calls_need_the_inference_token(server: Server) -> None:
    for path in ("/predictions/a", "/models/a/invoke", "/invocations?model_name=a"):
        for headers in ({}, bearer("wrong"), MANAGE):
            answer = requests.post(server.url(path), json=SHORT, headers=headers, timeout=60)
            assert error(answer)[0] == 401, path
        assert text(requests.post(server.url(path), json=SHORT, headers=INFER, timeout=60))


@pytest.mark.parametrize("port", ["port", "management_port"])
def test_models_are_listed_to_those_who_have_a_token(server: Server, port: str) -> None:
    base = f"http://127.0.0.1:{getattr(server, port)}/models"
    bare: list[dict[str, bytes]] = [
        {"Authorization": SECRETS["INFERENCE_TOKEN"].encode()},
        {"Authorization": b"Basic " + SECRETS["INFERENCE_TOKEN"].encode()},
    ]
    for url in (base, f"{base}/a", f"{base}?available=true"):
        for headers in ({}, bearer("wrong"), *bare):
            assert error(requests.get(url, headers=headers, timeout=60))[0] == 401
        for headers in (MANAGE, INFER, {"Authorization": b"bearer  infer-me"}):
            assert requests.get(url, headers=headers, timeout=60).status_code == 200


def test_health_needs_no_token(server: Server) -> None:
    for path in ("/ping", "/health", "/metrics", "/openapi.json"):
        assert requests.get(server.url(path), timeout=60).status_code == 200


def test_a_body_that_is_too_large_is_413(server: Server) -> None:
    body = json.dumps({"inputs": "가" * LIMIT}).encode()
    url = server.url("/predictions/a")
    headers = {**INFER, "Content-Type": b"application/json"}
    answer = requests.post(url, data=body, headers=headers, timeout=60)
    assert error(answer) == (413, "RequestTooLargeException")
    assert str(LIMIT) in answer.json()["message"]
    pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
    chunked = requests.post(url, data=pieces, headers=headers, timeout=60)
    assert error(chunked) == (413, "RequestTooLargeException")
    load = requests.post(server.url("/models"), data=body, headers=MANAGE, timeout=60)
    assert error(load) == (413, "RequestTooLargeException")
    fits = json.dumps(SHORT).encode().ljust(LIMIT)
    assert text(requests.post(url, data=fits, headers=headers, timeout=60))


def test_an_announced_length_is_refused_before_the_body_comes(server: Server) -> None:
    head = b"POST /predictions/a HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer infer-me\r\n"
    answer = raw(server.port, head + b"Content-Length: 999999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


def test_workers_know_no_credentials(server: Server) -> None:
    words = ("model_service_worker", "handlers.host", "ModelServer")
    processes = [process for word in words for process in server.descendants(word)]
    assert len(processes) >= 3
    for process in processes:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode()
        for value in SECRETS.values():
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


def test_the_secret_of_the_probe_is_not_told(server: Server) -> None:
    worker = psutil.Process(server.descendants("model_service_worker")[0].pid)
    secret = worker.environ()["PROBE_SECRET"]
    headers = {**INFER, "x-kogpt2-probe": secret.encode()}
    answer = requests.post(server.url("/predictions/a"), json=SHORT, headers=headers, timeout=60)
    assert text(answer)  # a client's copy goes nowhere
    assert secret not in server.text()
    for value in SECRETS.values():
        assert value not in server.text()
