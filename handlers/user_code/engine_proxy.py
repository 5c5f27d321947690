"""Forwards a script's calls to its own model in the engine, through the worker.

Scripts cannot connect to the engine's socket: any process that does may unload any model.
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

from common.errors import EngineError, EngineUnavailable, InvalidRequest, Overloaded
from handlers.user_code.messages import (
    MALFORMED,
    error_from,
    error_row,
    receive,
    receive_from_script,
    send,
)

if TYPE_CHECKING:
    from engine.http.client import ModelHandle

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 16  # per script process; further calls wait
# Calls of a script process that wait or run; further ones are refused. Larger: a script that calls
# without limit takes the worker's memory. Smaller: a large batch of prompts is refused.
MAX_CALLS = 256
THREAD_RETRY_S = 0.1  # poll interval while the first thread cannot start


def serve(connection: Connection, name: str, model_dir: str) -> None:
    """Answer one model's `EngineModel` calls until the script ends, on a thread of the worker.

    A call gets the error `Overloaded` if `MAX_CALLS` others have no answer yet.
    """
    from handlers.text import text_model  # here, so that its imports do not delay the script

    lock, free = threading.Lock(), threading.Semaphore(MAX_CALLS)
    handle: ModelHandle | None = None

    def answer(call: dict[str, Any]) -> dict[str, Any]:
        nonlocal handle
        if "generate" not in call:
            with lock:
                handle = handle or text_model.model_fn(model_dir, name)
            return handle.model
        if handle is None:
            raise EngineUnavailable("the model is not loaded")
        inputs, parameters, timeout_s, request_id = call["generate"]
        return handle.generate(inputs, parameters, float(timeout_s), request_id)

    def respond(call: dict[str, Any]) -> None:
        try:
            reply = {"answer": answer(call)}
        except EngineError as error:
            reply = {"error": error_row(error)}
        except MALFORMED as error:  # no traceback: a script may repeat it without limit
            message = f"the call to the engine is malformed: {error!r:.200}"
            reply = {"error": error_row(InvalidRequest(message))}
        except Exception:
            logger.exception("%s: a call of its script to the engine failed", name)
            reply = {"error": error_row(EngineError("the call to the engine failed"))}
        free.release()
        send_reply(call, reply)

    def send_reply(call: dict[str, Any], reply: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), lock:
            send(connection, {**reply, "call": call.get("call")})

    with (
        connection,
        ThreadPoolExecutor(MAX_CONCURRENT_CALLS) as pool,
        contextlib.suppress(EOFError, OSError, ValueError),
    ):
        while not _submitted(pool, int):  # starts its first thread
            time.sleep(THREAD_RETRY_S)
        while True:
            call = receive_from_script(connection)[0]
            if free.acquire(blocking=False):
                _submitted(pool, respond, call)
            else:
                full = Overloaded(f"{MAX_CALLS} calls of the script wait for its model already")
                send_reply(call, {"error": error_row(full)})
    if handle is not None:
        handle.close()


def _submitted(pool: ThreadPoolExecutor, *work: Any) -> bool:
    """Submit work to a pool; False if no thread could start: the work waits for a free thread."""
    try:
        pool.submit(*work)
    except RuntimeError:
        return False
    return True


class EngineModel:
    """A script's model in the engine, like `engine.http.client.ModelHandle`. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        """Load the model. Raises what the engine raises."""
        self._connection = connection
        self._lock = threading.Lock()
        self._calls = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        threading.Thread(target=self._read, name="engine", daemon=True).start()
        self.model = self._call({})

    def generate(
        self,
        inputs: str | Mapping[str, str],
        parameters: Mapping[str, Any],
        timeout_s: float = 60.0,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Generate texts in the engine. Raises what `ModelHandle.generate` does.

        Raises `Overloaded`, too, if `MAX_CALLS` calls of this process have no answer yet.
        """
        return self._call({"generate": [inputs, parameters, timeout_s, request_id]})

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()
        number = next(self._calls)
        self._waiting[number] = future
        with self._lock:
            send(self._connection, {**call, "call": number})
        reply = future.result()
        if "error" in reply:
            raise error_from(reply["error"])
        answer: dict[str, Any] = reply["answer"]
        return answer

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                reply, _ = receive(self._connection)
                self._waiting.pop(reply["call"]).set_result(reply)
        closed = {"error": error_row(EngineUnavailable("the worker closed its connection"))}
        while self._waiting:
            self._waiting.popitem()[1].set_result(closed)
