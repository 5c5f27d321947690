"""Requests to a running engine, decoding without a cache, and the engine as a process."""

from __future__ import annotations

import functools
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from common.errors import EngineError
from engine.artifacts.artifact import EMBEDDING, OUTPUT
from engine.artifacts.open import open_artifact
from engine.engine import Engine
from engine.generation import TextSequence, Token
from engine.http.client import UnixConnection
from engine.model import Core, Model, Residence
from engine.scheduler import Batch
from engine.text.prompts import Inputs
from tests.engine.models import make_artifact, params_of, write_params
from tests.lazy import mx, mxnet_model
from tests.processes import eventually

WAIT_S = 60.0
EOS = 3


def make_talkative(path: Path, *, end_like: int | None = None, **sizes: Any) -> Path:
    """An artifact whose greedy text never ends by itself, or only where `end_like` would come."""
    make_artifact(path, **sizes)
    weights = params_of(path)
    for name in (EMBEDDING, OUTPUT):
        weights[name][EOS] = 0 if end_like is None else 1.05 * weights[name][end_like]
    write_params(path / "kogpt2.params", weights)
    return path


AnyResult = TypeVar("AnyResult", bound="Result")


class Result:
    """The tokens of a request's sequences. `on_token` is called on the thread that emits."""

    sequences: list[TextSequence]

    def __init__(self, answers: int = 1, on_token: Callable[[Any], object] = id) -> None:
        self.tokens: list[Token] = []
        self.error: EngineError | None = None
        self._left, self._on_token = answers, on_token
        self._done = threading.Event()

    def emit(self, item: Token | EngineError) -> None:
        if isinstance(item, EngineError):
            self.error = item
            self._left = 0
        else:
            self.tokens.append(item)
            self._left -= item.finish_reason is not None
            self._on_token(self)
        if self._left == 0:
            self._done.set()

    def wait(self: AnyResult) -> AnyResult:
        assert self._done.wait(WAIT_S), "the request was not finished"
        return self

    def begun(self: AnyResult) -> AnyResult:
        eventually(lambda: self.tokens)
        return self

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def prompt(self) -> list[int]:
        return self.sequences[0].prompt

    def ids(self, index: int = 0) -> list[int]:
        """The new ids."""
        return [t.id for t in self.tokens if t.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(t.text for t in self.tokens if t.index == index)

    def finish_reason(self, index: int = 0) -> str | None:
        return [t.finish_reason for t in self.tokens if t.index == index][-1]


class Request(Result):
    """A request to an engine in this process."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        prompt: Inputs,
        on_token: Callable[[Request], object] = id,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> None:
        checked = engine.parameters(name, parameters)
        super().__init__(checked.num_return_sequences, on_token)
        self.sequences = engine.submit(name, prompt, checked, self.emit, timeout_s).result()


class NoTexts:
    """Stands in for `engine.text.texts.Texts`: sends tokens at once and without a text."""

    def write(self, sequences: list[TextSequence]) -> None:
        for sequence in sequences:
            for token in sequence.take_tokens():
                sequence.send(token)


def model_on(compute: Any, batch: Batch, name: str = "m") -> Model:
    """A model on a resident core, without an engine."""
    batch.open(compute, 0)
    core = Core(
        name=name,
        key=name,
        backend="",
        precision="",
        artifact=compute,  # for its configuration
        open=lambda run: compute,
        batch=batch,
        reserved_bytes=0,
        compute=compute,
        residence=Residence.RESIDENT,
    )
    return Model(name, Path(), core, cast(Any, NoTexts()))


class Gate:
    """Holds the thread that calls it, until another opens it."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> bool:
        self._reached.set()
        assert self._open.wait(WAIT_S)
        return True

    def reached(self) -> None:
        """Waits until a thread is held."""
        assert self._reached.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


class Pause:
    """Holds the engine's thread between two turns until `go_on` or the end of the `with` block."""

    def __init__(self, engine: Engine) -> None:
        self._gate = Gate()
        self._thread = threading.Thread(target=engine._loop.call, args=[self._gate])

    def go_on(self) -> None:
        self._gate.open()
        self._thread.join()

    def __enter__(self) -> Pause:
        self._thread.start()
        self._gate.reached()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()


@functools.cache
def uncached_model(path: Path) -> Any:
    """The MXNet model of an artifact, to be called with whole texts."""
    artifact = open_artifact(path)
    return mxnet_model.GPT2(artifact.config, artifact.weights)


def is_greedy(path: Path, prompt: list[int], new: list[int]) -> bool:
    """Whether each id is the likeliest after those before it, in one pass over the whole text."""
    whole = np.array([*prompt, *new])[None, :]
    logits = uncached_model(path)(mx.nd.array(whole)).asnumpy()[0]  # (T, V)
    return bool((logits[len(prompt) - 1 : -1].argmax(axis=1) == new).all())


def settle(engine: Engine) -> None:
    """Waits for the step that is under way."""
    engine._loop.call(lambda: None)


class EngineProcess:
    """`python -m engine`, or another module, on a unix socket."""

    def __init__(
        self,
        folder: Path,
        module: str = "engine",
        *,
        python: str | Path = sys.executable,
        root: Path = Path(__file__).parents[2],
        wait_s: float = WAIT_S,
        **environment: str,
    ) -> None:
        self._command = [str(python), "-m", module]
        self._root, self._wait_s = root, wait_s
        self.socket = folder / "engine.sock"
        assert len(str(self.socket)) < 108, "too long for a unix socket"
        self._log = (folder / "engine.log").open("a")
        variables = {k: v for k, v in os.environ.items() if not k.startswith("ENGINE_")}
        self._open: list[http.client.HTTPResponse] = []
        self._environment = variables | {"ENGINE_SOCKET": str(self.socket)} | environment
        self.start()

    def start(self, *, wait: bool = True) -> None:
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            cwd=self._root,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        if wait:
            try:
                eventually(self._answers, self._wait_s)
            except BaseException:
                self.close()
                raise

    def _answers(self) -> bool:
        assert self.process.poll() is None, "the engine ended"
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the process, as the kernel does when memory runs out."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def terminate(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.terminate()
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._log.close()
        while self._open:
            self.drop(self._open[0])

    def connect(self, timeout_s: float = WAIT_S) -> UnixConnection:
        return UnixConnection(self.socket, timeout_s)

    def open(self, method: str, url: str, body: Any = None) -> http.client.HTTPResponse:
        """An answer of which nothing has been read but the head. `drop` hangs up."""
        connection = UnixConnection(self.socket, self._wait_s)
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, url, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        response.connection = connection  # type: ignore[attr-defined]
        self._open.append(response)
        return response

    def drop(self, response: http.client.HTTPResponse) -> None:
        self._open.remove(response)
        response.close()
        response.connection.close()  # type: ignore[attr-defined]

    def call(self, method: str, url: str, body: Any = None) -> tuple[int, Any]:
        response = self.open(method, url, body)
        content = response.read()
        self.drop(response)
        return response.status, json.loads(content) if content else None

    def statistics(self, name: str) -> dict[str, Any]:
        """Return the statistics of one model, empty if it is not loaded."""
        models = self.call("GET", "/statistics")[1]["models"]
        return next((m for m in models if m["name"] == name), {})


def engine_process(folder: Path, module: str = "engine", **env: Any) -> closing[EngineProcess]:
    return closing(EngineProcess(folder, module, **env))
