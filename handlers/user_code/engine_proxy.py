"""A model in the engine, for a script around it: the script asks its worker, which asks the engine.

Scripts cannot reach the engine's socket, where anybody may unload any model.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from common.errors import EngineError, EngineUnavailable
from handlers.user_code.messages import error_of, error_row, receive, send

if TYPE_CHECKING:
    from engine.http.client import ModelHandle

logger = logging.getLogger(__name__)

CALLS_AT_ONCE = 16
RETRY_S = 0.1  # of a thread that does not start


def serve(connection: Connection, name: str, model_dir: str) -> None:
    """In a thread of the worker, answers what `EngineModel` asks about this one model until the
    script is gone; then the engine may unload it."""
    from handlers.text import text_model  # no script needs to wait for its imports

    lock = threading.Lock()
    handle: ModelHandle | None = None

    def answer(call: dict[str, Any]) -> dict[str, Any]:
        nonlocal handle
        if "inputs" not in call:
            with lock:
                handle = handle or text_model.model_fn(model_dir, name)
            return handle.model
        if handle is None:
            raise EngineUnavailable("the model is not loaded")
        return handle.generate(
            call["inputs"], call["parameters"], float(call["timeout_s"]), call["request_id"]
        )

    def respond(call: dict[str, Any]) -> None:
        try:
            said = {"answer": answer(call)}
        except EngineError as error:
            said = {"error": error_row(error)}
        except Exception:
            logger.exception("%s: a call of its script to the engine failed", name)
            said = {"error": error_row(EngineError("the call to the engine failed"))}
        with contextlib.suppress(OSError), lock:
            send(connection, {**said, "call": call.get("call")})

    nonsense = (ValueError, KeyError, TypeError, AttributeError)
    with (
        connection,
        ThreadPoolExecutor(CALLS_AT_ONCE) as pool,
        contextlib.suppress(EOFError, OSError, *nonsense),
    ):
        while not _submitted(pool, int):  # its first thread
            time.sleep(RETRY_S)
        while True:
            _submitted(pool, respond, receive(connection)[0])
    if handle is not None:
        handle.close()


def _submitted(pool: ThreadPoolExecutor, *work: Any) -> bool:
    """Whether the pool has a thread for it, or had no need of a new one; else the work is in its
    queue, for the next thread that is free."""
    try:
        pool.submit(*work)
    except RuntimeError:
        return False
    return True


class EngineModel:
    """In the script, as `engine.http.client.ModelHandle`. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        """Loads the model. Raises what the engine raises."""
        self._connection = connection
        self._lock = threading.Lock()
        self._calls = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        threading.Thread(target=self._read, name="engine", daemon=True).start()
        self.model = self._ask({})

    def generate(
        self,
        inputs: str | Mapping[str, str],
        parameters: Mapping[str, Any],
        timeout_s: float = 60.0,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """The engine's answer. Raises what `ModelHandle.generate` does."""
        asked = {"inputs": inputs, "parameters": parameters, "timeout_s": timeout_s}
        return self._ask({**asked, "request_id": request_id})

    def _ask(self, call: dict[str, Any]) -> dict[str, Any]:
        answered: Future[dict[str, Any]] = Future()
        number = next(self._calls)
        self._waiting[number] = answered
        with self._lock:
            send(self._connection, {**call, "call": number})
        said = answered.result()
        if "error" in said:
            raise error_of(said["error"])
        answer: dict[str, Any] = said["answer"]
        return answer

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                said, _ = receive(self._connection)
                self._waiting.pop(said["call"]).set_result(said)
        gone = {"error": error_row(EngineUnavailable("the worker does not answer any more"))}
        while self._waiting:
            self._waiting.popitem()[1].set_result(gone)
