"""The engine's HTTP server, on a unix socket.

    POST   /models                  load a model:
                                    {"name", "model_dir", "base"?, "backend"?, "precision"?,
                                     "max_rows"?, "lease"?}; base is the folder of the base model of
                                    what is in model_dir. The answer has `base`, or `whole_because`
                                    if a whole model shares nothing with it
    GET    /models                  the loaded models, their bases and bytes of the budget
    DELETE /models/{name}           unload a model
    POST   /models/{name}/generate  {"inputs", "parameters"?, "timeout_s"?, "stream"?,
                                     "request_id"?}; inputs are a text, or an object with the fields
                                    of the model's template. In their place: "prompt", a text or ids
                                    without the template, or "messages" for the chat template,
                                    `{"role", "content"}`
    POST   /models/{name}/classify  {"inputs", "first"?, "truncate"?, "timeout_s"?, "request_id"?};
                                    inputs are a list of texts or pairs, each a list of strings, of
                                    a longer list whose text number `first` is the first here:
                                    `{"results": [{"logits"}], "prompt_tokens"}`; of a classifier
                                    of tokens with their places, `{"begins", "ends", "special"}`
    POST   /models/{name}/tokenize  {"prompt" | "messages", "special"?}: `{"tokens", "texts",
                                     "max_length"}`
    POST   /models/{name}/detokenize {"tokens"}: `{"text"}`
    DELETE /requests/{request_id}   cancel a request whose client has disconnected
    POST   /room                    check whether a load would fit now:
                                    {"name", "model_dir", "base"?, "backend"?, "precision"?,
                                     "promised"?}, promised being the bytes of other models that
                                    will be loaded, by name; `{"weight_bytes", "missing_bytes"?,
                                    "message"?}`, the last two if it would not fit
    GET    /health                  503 where no step completes, see `engine.step_loop`
    GET    /statistics              all counters, also those of each model

Try it with `curl --unix-socket $ENGINE_SOCKET http://engine/statistics`. Errors are `{"code",
"type", "message"}`; a stream is NDJSON, one token a line, and ends with a line that has
`finish_reason` or, after an error, `error`.

With `"lease": true` the response to a load stays open, and the model stays loaded while any such
response does: a worker's models are unloaded however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common import fields
from common.errors import Cancelled, EngineError, InvalidRequest, NeverFits, OutOfMemory
from common.parameters import Parameters
from engine.classification import Classification
from engine.engine import Engine
from engine.generation import TextSequence, Token
from engine.http import leases, protocol
from engine.http.answer import Answer, Logits
from engine.http.protocol import json_line, text_of
from engine.http.stream import NdjsonStream, disconnected
from engine.sandbox.reading import Reading
from engine.sequence import Sequence
from engine.text.prompts import Chat, Inputs, Raw
from engine.text.texts import Texts

logger = logging.getLogger(__name__)

MAX_TIMEOUT_S = 3600
MAX_LOADS = 64  # threads that load, or check a load; all others share the default forty
MAX_CANCELLED_IDS = 1000  # of cancelled requests that may still arrive
LARGE_ENTRIES = 500  # answers with more token texts are rendered on a thread
T = TypeVar("T")
Collector = TypeVar("Collector", Answer, Logits)
Made = TypeVar("Made", bound=Sequence)


class EngineApp:
    """The HTTP routes of one `Engine`, as an ASGI application."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stopping = asyncio.Event()
        self._leases = leases.Leases(engine, self.stopping)
        self._loads = CapacityLimiter(MAX_LOADS)
        self._running: dict[str, set[Callable[[], None]]] = {}  # by request id
        # A request may still be on its way when it is cancelled.
        self._cancelled: deque[str] = deque(maxlen=MAX_CANCELLED_IDS)
        self.asgi = Starlette(
            routes=[
                Route("/models/{name:path}/generate", self._generate, methods=["POST"]),
                Route("/models/{name:path}/classify", self._classify, methods=["POST"]),
                Route("/models/{name:path}/tokenize", self._tokenize, methods=["POST"]),
                Route("/models/{name:path}/detokenize", self._detokenize, methods=["POST"]),
                Route("/models", self._load, methods=["POST"]),
                Route("/models", self._list, methods=["GET"]),
                Route("/models/{name:path}", self._unload, methods=["DELETE"]),
                Route("/requests/{id}", self._cancel, methods=["DELETE"]),
                Route("/room", self._check_load, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/statistics", self._statistics, methods=["GET"]),
            ],
            exception_handlers={EngineError: _error_response},
        )

    # Models

    async def _load(self, request: Request) -> Response:
        body = await protocol.json_object(request)
        options, max_rows = _load_options(body), body.get("max_rows")
        if max_rows is not None and (type(max_rows) is not int or max_rows < 1):
            raise InvalidRequest("max_rows must be an integer of at least 1")
        name, lease = options["name"], bool(body.get("lease"))
        if lease:
            self._leases.take(name)
        try:
            model = await self._unless_gone(
                request,
                lambda reading: self._engine.load(**options, max_rows=max_rows, reading=reading),
            )
            loaded = self._engine.describe(model)
        except BaseException:
            if lease:
                self._leases.release(name, loaded=False)
            raise
        if not lease:
            return JSONResponse(loaded)

        async def hold() -> AsyncIterator[str]:
            yield json_line(loaded)
            await self.stopping.wait()

        return NdjsonStream(hold(), lambda: self._leases.release(name))

    async def _unless_gone(self, request: Request, work: Callable[[Reading], T]) -> T:
        """Run `work` on a thread, and cancel it if the client disconnects or the engine stops."""
        reading = Reading()
        thread = to_thread.run_sync(work, reading, limiter=self._loads)
        working = asyncio.ensure_future(thread)
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(disconnected(request.receive)),
            asyncio.ensure_future(self.stopping.wait()),
        ]
        try:
            await asyncio.wait([working, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                reading.cancel()
            return await working
        finally:
            for end in ends:
                end.cancel()

    async def _check_load(self, request: Request) -> Response:
        body = await protocol.json_object(request)
        options, promised = _load_options(body), body.get("promised") or {}
        if not isinstance(promised, dict) or not all(type(n) is int for n in promised.values()):
            raise InvalidRequest("promised must be an object of integers")
        try:
            needed = await self._unless_gone(
                request,
                lambda reading: self._engine.check(**options, promised=promised, reading=reading),
            )
        except NeverFits:
            raise
        except OutOfMemory as error:
            missing = {"missing_bytes": error.missing_bytes, "message": error.message}
            return JSONResponse({"weight_bytes": error.needed_bytes, **missing})
        return JSONResponse({"weight_bytes": needed})

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"models": self._engine.held()})

    async def _unload(self, request: Request) -> Response:
        await run_in_threadpool(self._engine.unload, request.path_params["name"])
        return Response(status_code=204)

    async def _health(self, request: Request) -> Response:
        health = self._engine.health()
        return JSONResponse(health, status_code=200 if health["status"] == "ok" else 503)

    async def _statistics(self, request: Request) -> Response:
        return await run_in_threadpool(lambda: JSONResponse(self._engine.statistics()))

    # Generation

    async def _object(self, name: str, request: Request) -> dict[str, Any]:
        if (length := len(await request.body())) > protocol.LARGE_BYTES:
            self._engine.check_bytes(name, length)
        return await protocol.json_object(request)

    async def _tokenize(self, request: Request) -> Response:
        name = request.path_params["name"]
        body = await self._object(name, request)
        special = body.get("special") is not False
        what: str | list[dict[str, str]]
        match protocol.inputs_of(body):
            case Raw(str(what)) | Chat(what):
                pass
            case _:
                raise InvalidRequest("prompt must be text, or messages a chat")

        def tokenize(texts: Texts) -> dict[str, Any]:
            ids, pieces = texts.tokenize(what, special)
            return {"tokens": ids, "texts": pieces, "max_length": texts.max_length}

        return JSONResponse(await asyncio.wrap_future(self._engine.with_texts(name, tokenize)))

    async def _detokenize(self, request: Request) -> Response:
        name = request.path_params["name"]
        ids = (await self._object(name, request)).get("tokens")
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise InvalidRequest("tokens must be a list of token ids")
        future = self._engine.with_texts(name, lambda texts: texts.detokenize(ids))
        return JSONResponse({"text": await asyncio.wrap_future(future)})

    async def _generate(self, request: Request) -> Response:
        name = request.path_params["name"]
        body = await self._object(name, request)
        inputs = protocol.inputs_of(body)
        parameters = self._engine.parameters(name, body.get("parameters"))
        timeout_s = _timeout_of(body)
        if fields.boolean("stream", body.get("stream", False)):
            return await self._stream(request, name, inputs, parameters, timeout_s)

        def submit(done: Callable[[], None]) -> tuple[Answer, Future[list[TextSequence]]]:
            answer = Answer(parameters.num_return_sequences, done)
            return answer, self._engine.submit(
                name, inputs, parameters, answer.emit, timeout_s, stream=False
            )

        answer, sequences = await self._whole(request, body, submit)

        def build() -> Response:
            return JSONResponse({**protocol.prompt_body(sequences[0]), **answer.result()})

        return await run_in_threadpool(build) if answer.entries > LARGE_ENTRIES else build()

    async def _classify(self, request: Request) -> Response:
        name = request.path_params["name"]
        body = await protocol.json_object(request)
        texts, timeout_s, first = protocol.texts_of(body), _timeout_of(body), body.get("first")
        truncate = fields.boolean("truncate", body.get("truncate", False))
        if first is not None and type(first) is not int:
            raise InvalidRequest("first must be an integer")

        def submit(done: Callable[[], None]) -> tuple[Logits, Future[list[Classification]]]:
            logits = Logits(len(texts), done)
            return logits, self._engine.classify(
                name, texts, logits.emit, timeout_s, first=first, truncate=truncate
            )

        logits, sequences = await self._whole(request, body, submit)
        encoded = [sequence.encoded for sequence in sequences]
        return await run_in_threadpool(lambda: JSONResponse(logits.result(encoded)))

    async def _whole(
        self,
        request: Request,
        body: dict[str, Any],
        submit: Callable[[Callable[[], None]], tuple[Collector, Future[list[Made]]]],
    ) -> tuple[Collector, list[Made]]:
        """Wait for a whole answer; cancel it if the client disconnects, or by the request's id.

        `submit` submits the request; its collector calls the function that `submit` gets.
        """
        request_id = text_of(body, "request_id") if "request_id" in body else ""
        if request_id in self._cancelled:
            raise Cancelled("the request was cancelled")
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        def done() -> None:
            loop.call_soon_threadsafe(end)

        answer, submitted = submit(done)
        # Only a failure wakes the event loop, whose thread competes with the step loop's.
        submitted.add_done_callback(lambda f: done() if _sequences(f) is None else None)
        ends = self._running.setdefault(request_id, set())
        ends.add(end)
        gone = asyncio.ensure_future(disconnected(request.receive))
        gone.add_done_callback(lambda _: end())
        try:
            await over
        finally:
            gone.cancel()
            ends.discard(end)
            if not ends:
                del self._running[request_id]
            failed = not answer.is_complete or answer.error is not None
            if failed and not submitted.cancel():
                submitted.add_done_callback(lambda f: self._engine.cancel(_sequences(f) or []))
        if not answer.is_complete:
            if not submitted.cancelled() and submitted.done():
                submitted.result()  # raises the error that the submission ended with
            raise Cancelled("the request was cancelled")
        return answer, submitted.result()

    async def _cancel(self, request: Request) -> Response:
        request_id = request.path_params["id"]
        self._cancelled.append(request_id)
        for end in [*self._running.get(request_id, ())]:
            end()
        return Response(status_code=204)

    async def _stream(
        self,
        request: Request,
        name: str,
        inputs: Inputs,
        parameters: Parameters,
        timeout_s: float | None,
    ) -> Response:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Token | EngineError] = asyncio.Queue()

        def emit(item: Token | EngineError) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        submitted = self._engine.submit(name, inputs, parameters, emit, timeout_s)
        queued = asyncio.wrap_future(submitted)
        gone = asyncio.ensure_future(disconnected(request.receive))
        ends: list[asyncio.Future[Any]] = [queued, gone]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not queued.done() and submitted.cancel():
            raise Cancelled("the client has disconnected")
        gone.cancel()
        sequences = await queued

        async def lines() -> AsyncIterator[str]:
            unfinished, begun = len(sequences), set[int]()
            while unfinished:
                item = await queue.get()
                if isinstance(item, EngineError):
                    yield json_line({"error": item.to_body()})
                    return
                body = protocol.token_body(item)
                if item.index not in begun:
                    begun.add(item.index)
                    body |= protocol.prompt_body(sequences[0])
                unfinished -= item.finish_reason is not None
                yield json_line(body)

        return NdjsonStream(lines(), lambda: self._engine.cancel(sequences))


def _load_options(body: dict[str, Any]) -> dict[str, Any]:
    """Return the options that `POST /models` and `POST /room` share. Raises `InvalidRequest`."""
    return {
        "name": text_of(body, "name"),
        "model_dir": text_of(body, "model_dir"),
        "backend": body.get("backend"),
        "precision": body.get("precision"),
        "base": None if body.get("base") is None else text_of(body, "base"),
    }


def _timeout_of(body: dict[str, Any]) -> float | None:
    timeout_s = body.get("timeout_s")
    if timeout_s is None:
        return None
    return fields.number("timeout_s", timeout_s, 0, MAX_TIMEOUT_S, above=True)


def _sequences(submitted: Future[Any]) -> Any:
    """Return the sequences of a finished submission; None if it was cancelled or failed."""
    if submitted.cancelled() or submitted.exception() is not None:
        return None
    return submitted.result()


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{error.retry_after_s:.0f}"
    return JSONResponse(error.to_body(), status_code=error.status, headers=headers)
