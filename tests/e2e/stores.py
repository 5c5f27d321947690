"""Stores of small models with random weights, and servers on them that start fast."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests

from engine.http.client import EngineClient
from serving.api import routes
from tests.e2e.server import Server, eventually, free_port
from tests.engine import deltas
from tests.engine.hugging_face import write_json
from tests.engine.models import make_artifact

FAST = {"ENGINE_BACKEND": "native", "ENGINE_PRECISION": "fp32"}
SMALL_BYTES = 1_734_656  # what the engine reserves for one: 2 fit into 4 MiB, 5 into 9
SHORT = {"inputs": "나는 오늘", "parameters": {"max_new_tokens": 16}}
# A second and more of work for `slow`. A token costs as much as there are before it: three times as
# many would take ten times as long.
LONG: dict[str, Any] = {
    "inputs": "나는 오늘",
    "parameters": {"max_new_tokens": 1000, "num_return_sequences": 2, "temperature": 0.01},
}
# More than `endless` does before its client has left or its time is up, however late those are.
ENDLESS_TOKENS = 8000
ENDLESS = {
    "inputs": "나는 오늘",
    "parameters": {**LONG["parameters"], "max_new_tokens": ENDLESS_TOKENS},
}


def small(path: Path, seed: int = 0) -> Path:
    """A model whose greedy text differs from that of other seeds."""
    return make_artifact(path, layers=2, units=128, vocab=160, max_length=128, seed=seed)


def fine_tuned(path: Path, base: Path, base_name: str, seed: int = 0) -> Path:
    """A fine-tune of a v1 model, with the base's name in its files, that is computed in int8."""
    deltas.fine_tuned(path, base, seed=seed)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | {"_name_or_path": base_name})
    write_json(path / "serving.json", {"precision": "int8"})
    return path


def slow(path: Path) -> Path:
    """A model that takes a second and more for `LONG`."""
    return make_artifact(path, layers=4, units=256, heads=4, vocab=160, max_length=4096)


def endless(path: Path) -> Path:
    """A model as slow, which can be asked for `ENDLESS`."""
    return make_artifact(path, layers=4, units=256, heads=4, vocab=160, max_length=8192)


def packed(folder: Path, archive: Path) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, file.name)
    return archive


@contextlib.contextmanager
def serving(folder: Path, store: Path | None = None, **environment: str) -> Iterator[Server]:
    """A ready server with the fast backend."""
    folder.mkdir(exist_ok=True)
    with Server(folder, store, {**FAST, **environment}) as server:
        yield server


class Shared:
    """A server of the fast backend, started when it is first asked for, and again when the test
    before has ended it or failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._server: Server | None = None

    def clean(self) -> Server:
        """The shared server with no model and an empty store; its log begins here."""
        if self._server is None or not _is_well(self._server):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
            self._starts += 1
            folder = self._folder / str(self._starts)
            (folder / "store").mkdir(parents=True)
            settings = {**FAST, "DRAIN_S": "60", "GRPC_PORT": str(free_port())}
            self._server = Server(folder, folder / "store", settings)
            self._server.wait_until_ready()
        _empty(self._server)
        return self._server

    def stop(self) -> None:
        if self._server is not None and self._server.process.poll() is None:
            self._server.stop()


def _is_well(server: Server) -> bool:
    """Whether the server runs and has recovered, soon, from what the last test broke."""
    end = time.monotonic() + 30
    while server.process.poll() is None and time.monotonic() < end:
        if server.is_ready():
            return True
        time.sleep(0.05)
    return False


def _empty(server: Server) -> None:
    for path in server.store.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in server.loaded():
        assert server.unload(quote(name)).status_code == 200
    eventually(lambda: "aliases" not in server.get("/models").json())  # their file is gone
    eventually(lambda: not server.descendants("--sock-name"))  # of workers, also of scripts
    eventually(lambda: statistics(server)["models"] == [])  # a killed worker's lease has to end
    server.forget_log()


def statistics(server: Server) -> dict[str, Any]:
    """The engine's own."""
    client = EngineClient(str(server.run_dir / "engine.sock"))
    try:
        found: dict[str, Any] = client.request("GET", "/statistics")
        return found
    finally:
        client.close()


def running(server: Server) -> int:
    """Sequences that the engine works on."""
    return sum(m["running"] + m["waiting"] for m in statistics(server)["models"])


def count(server: Server, what: str, name: str) -> int:
    """Return the engine's count of `steps`, `rows` or `requests` of a model since it was loaded."""
    models = statistics(server)["models"]
    return sum(model[what] for model in models if model["name"].startswith(f"{name}#"))


@contextlib.contextmanager
def in_flight(server: Server, name: str, clients: int) -> Iterator[list[Future[requests.Response]]]:
    """Keep a number of long requests in flight."""
    with ThreadPoolExecutor(clients) as pool:
        answers = [pool.submit(server.predict, name, LONG) for _ in range(clients)]
        eventually(lambda: running(server) >= 2 * clients)
        yield answers


def greedy(
    server: Server, name: str, tokens: int = 16, prompt: str = "나는 오늘", **headers: Any
) -> str:
    """The likeliest text, by the server's own route."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}
    return text(server.predict(name, body, **headers))


def text(answer: requests.Response) -> str:
    assert answer.status_code == 200, answer.text
    generated: str = answer.json()["generated_text"]
    return generated


def error(answer: requests.Response) -> tuple[int, str]:
    """Status and type of an error in the one shape that all have."""
    body = answer.json()
    assert set(body) == {"code", "type", "message"}, body
    assert body["code"] == answer.status_code
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"]
    return answer.status_code, body["type"]


def status_of(answer: requests.Response) -> int:
    """Also where SageMaker's runtime would say it in a 424."""
    status: int = answer.status_code
    if status == 424:
        status = answer.json()["OriginalStatusCode"]
    return status


def every_call(name: str, *, managing: bool = False) -> Iterator[tuple[str, str, str, Any]]:
    """Method, route, path and body of a call of each route in the OpenAPI document, for a model."""
    for route, methods in routes.document(managing=managing)["paths"].items():
        path = route.replace("{name}", name).replace("{", "").replace("}", "")
        for method in methods:
            yield method, route, path, SHORT if method in ("post", "put") else None


def bearer(token: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {token}".encode()}


def events(answer: requests.Response) -> list[str]:
    """The data of each event of a whole stream."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"]
    *found, rest = answer.content.decode("utf-8").split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in found)
    return [event.removeprefix("data: ") for event in found]


def raw(port: int, request: bytes, timeout_s: float = 10.0) -> bytes:
    """Send these bytes to the server and return its response."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
            head, end, body = answer.partition(b"\r\n\r\n")
            if end and f"content-length: {len(body)}".encode() in head.lower():
                break
    return answer
