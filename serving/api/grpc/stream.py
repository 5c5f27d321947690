"""ModelStreamInfer: text models send one response per token, others one per request.

A token's response has the outputs of ModelInfer: all texts joined are the whole text, the sum of
all `tokens` is their number, and `finish_reason` is empty until the last response, which has
`triton_final_response` true. Requests of one call to text models run concurrently; responses have
the `id` of their request. An error is sent as a response, and the call continues.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import anyio
import orjson

from common.hints import HINTS, timeout_s
from common.worker_protocol import SERVED_MODEL
from handlers.text.v2 import DATATYPES
from handlers.v2 import pack_texts
from serving.api.gateway import Gateway
from serving.api.grpc.calls import CLIENT_GONE, Call, Idle, Reply, Routes, Unread, superseded
from serving.api.grpc.convert import EMPTY_END, ModelInferResponse, one_text, parameters
from serving.api.grpc.inference import converted, infer, model_path
from serving.api.grpc.messages import message
from serving.api.naming import SESSION_ID
from serving.api.request_body import header_text
from serving.errors import BadRequest, ServingError, Timeout
from serving.models.model import State
from serving.names import normal_name

ModelStreamInferResponse = message("inference.ModelStreamInferResponse")

FINAL = "triton_final_response"
AT_ONCE = 64  # concurrent requests of one call; a further one waits until one of them is done
HEADERS = {"content-type": "application/json", "accept": "application/x-ndjson"}


class Streams:
    def __init__(self, gateway: Gateway, routes: Routes, idle: Idle, unread: Unread) -> None:
        self._gateway, self._routes, self._idle = gateway, routes, idle
        self._unread = unread

    async def answer(self, requests: Any, context: Any) -> None:
        places, writing = anyio.Semaphore(AT_ONCE), asyncio.Lock()
        metadata, connection = context.invocation_metadata(), context.peer()
        reading: anyio.CancelScope | None = None  # set while the call waits for its next request
        failure: ServingError | None = None  # ends the call once its requests are answered

        def note_idle() -> None:
            if reading is not None and places.value == AT_ONCE:
                self._idle.add(reading)

        async def read() -> Any:
            """Return the next request; None at the end of the call or at a failure."""
            nonlocal reading, failure
            with anyio.CancelScope() as scope:
                reading = scope
                note_idle()
                try:
                    return await anext(requests, None)
                except BadRequest as error:
                    failure = error
                    return None
                finally:
                    self._idle.remove(scope)
                    reading = None
            failure = superseded()
            return None

        async def write(response: Any) -> None:
            size = response.ByteSize()
            self._unread.add(size, connection)
            try:
                async with writing:
                    with anyio.CancelScope(shield=True):  # a response is sent whole or not at all
                        await context.write(response)
            except CLIENT_GONE:
                raise asyncio.CancelledError from None
            finally:
                self._unread.remove(size, connection)

        async def stream(request: Any, model: str) -> None:
            try:
                await self._text(request, metadata, model, write)
            except ServingError as error:
                await write(_error(request, error.message))
            finally:
                places.release()
                note_idle()

        async with anyio.create_task_group() as tasks:
            while (request := await read()) is not None:
                model = self._choose(request, metadata)
                try:
                    await self._load(request, metadata, model)
                    if self._is_text(request, model):
                        await places.acquire()
                        tasks.start_soon(stream, request, model)
                    else:
                        await write(await self._whole(request, metadata, model))
                except ServingError as error:
                    await write(_error(request, error.message))
        if failure is not None:
            raise failure

    def _choose(self, request: Any, metadata: Any) -> str:
        """Return the model that answers, known in advance as an alias may mix kinds of models."""
        name = normal_name(request.model_name)
        alias = self._gateway.aliases.find(name)
        session = dict(metadata).get(SESSION_ID, "")
        return name if alias is None else alias.choose(header_text(session))

    async def _load(self, request: Any, metadata: Any, name: str) -> None:
        """Load a model, whose kind is known only then."""
        model = self._gateway.registry.find(name)
        if model is None or model.state is not State.READY or request.model_version:
            await self._routes.ask(Call(model_path(name, request.model_version)), metadata)

    def _is_text(self, request: Any, name: str) -> bool:
        model = self._gateway.registry.find(name)
        whole = "stream" in request.parameters and not request.parameters["stream"].bool_param
        return model is not None and model.in_engine and not model.task and not whole

    async def _whole(self, request: Any, metadata: Any, model: str) -> Any:
        request.parameters.pop("stream", None)
        response = await converted(await infer(self._routes, request, metadata, model))
        response.parameters[FINAL].bool_param = True
        return ModelStreamInferResponse(infer_response=response)

    async def _text(self, request: Any, metadata: Any, model: str, write: Any) -> None:
        tokens = Tokens(request)
        body = {"inputs": tokens.text, "parameters": tokens.parameters, "stream": True}
        path = f"/predictions/{request.model_name}"
        call = Call(path, "POST", orjson.dumps(body), dict(HEADERS), model)

        async def piece(reply: Reply, lines: bytes) -> None:
            tokens.model = unquote(reply.headers.get(SERVED_MODEL, "")) or tokens.model
            await write(tokens.response([orjson.loads(line) for line in lines.splitlines()]))

        with anyio.move_on_after(tokens.timeout_s) as scope:
            await self._routes.ask(call, metadata, piece)
        if scope.cancelled_caught:
            raise Timeout(f"no answer within {tokens.timeout_s:g} s")


class Tokens:
    """One request for a text, and its responses."""

    def __init__(self, request: Any) -> None:
        """Parse a `ModelInferRequest` to a text model. Raises `BadRequest`."""
        self.text = one_text(request)
        self._request = request
        self.model = normal_name(request.model_name)
        given = parameters(request.parameters)
        self.timeout_s = timeout_s(given)
        others = (EMPTY_END, "stream", *HINTS)
        self.parameters = {k: v for k, v in given.items() if k not in others}
        self._outputs = [output.name for output in request.outputs] or list(DATATYPES)
        for name in self._outputs:
            if name not in DATATYPES:
                known = ", ".join(DATATYPES)
                raise BadRequest(f"output {name:.100} is not known; known are {known}")
        self._full = self.text if self.parameters.get("return_full_text") is True else ""
        self._begun: set[int] = set()
        self._unfinished = self.parameters.get("num_return_sequences", 1)

    def response(self, lines: list[Mapping[str, Any]]) -> Any:
        """Return the response of a token; the last one also has the end of its sequence."""
        item, ends = lines[0], lines[1:]
        if "error" in item:
            return _error(self._request, item["error"]["message"])
        self._unfinished -= len(ends)
        before = "" if item["index"] in self._begun else self._full
        self._begun.add(item["index"])
        values = {
            "generated_text": pack_texts([before + item["text"]]),
            "tokens": struct.pack("<q", 1),
            "finish_reason": pack_texts([ends[0]["finish_reason"] if ends else ""]),
        }
        response = _head(self._request)
        response.model_name = self.model
        for name in self._outputs:
            response.outputs.add(name=name, datatype=DATATYPES[name], shape=[1])
            response.raw_output_contents.append(values[name])
        response.parameters[FINAL].bool_param = not self._unfinished
        if item["index"] or self._unfinished > 1:
            response.parameters["index"].int64_param = item["index"]
        return ModelStreamInferResponse(infer_response=response)


def _head(request: Any) -> Any:
    return ModelInferResponse(
        model_name=normal_name(request.model_name),
        model_version=request.model_version or "1",
        id=request.id,
    )


def _error(request: Any, reason: str) -> Any:
    """Return an error with the id of its request, as one call may have several requests."""
    head = _head(request)
    head.parameters[FINAL].bool_param = True
    return ModelStreamInferResponse(error_message=reason, infer_response=head)
