"""Starts the server as a user does, on free ports, and knows its processes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from testbed.process import free_port as free_port
from tests.processes import WIDE_S as WIDE_S
from tests.processes import eventually as eventually
from tests.processes import has_ended

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 300.0
START = {"START_TIMEOUT_S": f"{START_S:.0f}"}  # of a server on a crowded machine: only a net
STOP_S = 60.0


class Client:
    """Requests to a server by its ports."""

    host = "127.0.0.1"
    port: int
    management_port: int

    def is_ready(self) -> bool:
        try:
            return self.get("/ping", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def request(
        self, method: str, path: str, *, management: bool = False, **options: Any
    ) -> requests.Response:
        url = self.management(path) if management else self.url(path)
        return requests.request(method, url, **{"timeout": 90, **options})  # noqa: S113

    get = functools.partialmethod(request, "get")
    head = functools.partialmethod(request, "head")
    post = functools.partialmethod(request, "post")
    put = functools.partialmethod(request, "put")
    delete = functools.partialmethod(request, "delete")
    options = functools.partialmethod(request, "options")

    def loaded(self) -> list[str]:
        """The names of the models."""
        return [model["modelName"] for model in self.get("/models").json()["models"]]

    def load(self, name: str, url: str | None = None, **options: Any) -> requests.Response:
        body = {"model_name": name, "url": url or name, **options}
        return self.post("/models", management=True, json=body, timeout=180)

    def unload(self, name: str) -> requests.Response:
        return self.delete(f"/models/{name}", management=True, timeout=180)

    def predict(self, name: str, body: Any, **headers: str) -> requests.Response:
        """`body` is sent as JSON, or as it is when it is bytes."""
        sent = {"data" if isinstance(body, bytes) else "json": body}
        return self.post(f"/predictions/{name}", headers=headers, timeout=600, **sent)

    def url(self, path: str) -> str:
        return f"http://{self.host}:{self.port}{path}"

    def management(self, path: str) -> str:
        return f"http://{self.host}:{self.management_port}{path}"


class Server(Client):
    """`serve` in a process of its own; `log` is the file of everything it prints."""

    def __init__(
        self,
        folder: Path,
        store: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        options: bool = True,
        one_port: bool = False,
        port: int | None = None,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """Without `options` the ports come from the environment, as SageMaker gives them. `prefix`
        is a command that becomes the server."""
        self.host = host
        self.port = port or free_port()
        self.management_port = self.port if one_port else free_port()
        self.run_dir = folder / "run"
        self.log = folder / "server.log"
        self.grpc_address = f"{host}:{(environment or {}).get('GRPC_PORT')}"
        self.store = store or folder
        self._forgotten = 0
        ports = {"SAGEMAKER_BIND_TO_PORT": str(self.port), "HOST": host}
        ports["MANAGEMENT_PORT"] = str(self.management_port)
        command = [*prefix, sys.executable, "-m", "serving.entrypoint", "serve"]
        if options:
            ports = {}
            command += ["--port", str(self.port), "--management-port", str(self.management_port)]
            command += ["--host", host]
        if store is not None:
            command += ["--model-store", str(store)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    **START,
                    "RUN_DIR": str(self.run_dir),
                    **ports,
                    **(environment or {}),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> Server:
        """Waits until it is ready."""
        try:
            return self.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def wait_until_ready(self) -> Server:
        end = time.monotonic() + START_S
        while '"ready after' not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.05)
        return self

    def text(self) -> str:
        """The log since `forget_log`."""
        return self.log.read_bytes()[self._forgotten :].decode("utf-8")

    def forget_log(self) -> None:
        """What it logs from now on is all that `text` tells; a line that it writes now counts."""
        self._forgotten = self.log.read_bytes().rfind(b"\n") + 1

    def descendants(self, *words: str) -> list[psutil.Process]:
        """Living processes below the server whose command line has all of `words`."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join([*process.cmdline(), ""])
                if not has_ended(process) and all(w in line for w in words):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self.process.wait()

    def kill_gateway(self) -> None:
        """The next one is ready when this returns."""
        told = "the gateway was killed by SIGKILL"
        before = self.text().count(told)
        self.descendants("serving.gateway")[0].kill()
        eventually(lambda: self.text().count(told) > before)
        eventually(self.is_ready)
