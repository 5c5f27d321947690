"""Calling models: SageMaker's routes, Multi Model Server's, and the AWS client's.

POST /models/{name}/invoke            SageMaker multi-model
POST /invocations                     X-Amzn-SageMaker-Adapter-Identifier or -Target-Model,
                                      ?model_name=, the one model of
                                      a single-model endpoint, model=NAME in the custom attributes,
                                      or `model` in a body of OpenAI's;
                                      no model for a body that opens or closes a session
POST /predictions/{name}              Multi Model Server; OPTIONS describes it
POST /{name}/predict                  its legacy route
POST /generate, /generate_stream      TGI's; `parameters.adapter_id`, or what /invocations has
POST /endpoints/{name}/invocations    boto3's sagemaker-runtime with `endpoint_url` set to here
POST /endpoints/{name}/invocations-response-stream
GET  /ping
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import ServiceError, cut
from serving.api import openapi, sessions
from serving.api.bodies import read, read_tgi, tgi_error
from serving.api.event_stream import EVENT_STREAM, payload_part
from serving.api.invoke import invoke
from serving.api.naming import described_models, name_model
from serving.api.shared import (
    CUSTOM_ATTRIBUTES,
    LARGE_BYTES,
    TARGET_MODEL,
    Gateway,
    Right,
    check_token,
    header_text,
    off_loop,
)
from serving.api.stream import TokenStream
from serving.errors import BadRequest
from serving.names import normal_name

# Name the model where AWS has no TargetModel: in calls for a stream.
MODEL_ATTRIBUTE = re.compile(r"(?:^|[\s,;])model=([^\s,;]+)")
INFERENCE_COMPONENT = "x-amzn-sagemaker-inference-component"
ADAPTER = "x-amzn-sagemaker-adapter-identifier"
# What may name the model of a call of /invocations, the first that does counts.
NAMING = (ADAPTER, TARGET_MODEL, INFERENCE_COMPONENT)


class Inference:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return [
            Route("/models/{name:model}/invoke", self.named, methods=["POST"]),
            Route("/predictions/{name:model}", self.named, methods=["POST", "GET", "PUT"]),
            Route("/predictions/{name:model}", self.interface, methods=["OPTIONS"]),
            Route("/invocations", self.invocations, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/generate_stream", self.generate, methods=["POST"]),
            Route("/endpoints/{endpoint}/invocations", self.endpoint, methods=["POST"]),
            Route(
                "/endpoints/{endpoint}/invocations-response-stream",
                self.endpoint_stream,
                methods=["POST"],
            ),
            Route("/{name:model}/predict", self.named, methods=["POST"]),
        ]

    async def named(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.CALL)
        return await invoke(self._gateway, request, request.path_params["name"], read=read)

    async def interface(self, request: Request) -> Response:
        """What a model takes and answers, as Multi Model Server tells it; asking loads nothing."""
        name = request.path_params["name"]
        check_token(self._gateway, request, Right.CALL)
        name_model(self._gateway, request, name)
        for model in described_models(self._gateway, name):
            await self._gateway.find(model)
        return JSONResponse(openapi.of_model(name))

    async def invocations(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.CALL)
        target = self._target(request)
        return await invoke(self._gateway, request, target, read=read, intercept=self._session)

    async def generate(self, request: Request) -> Response:
        try:
            check_token(self._gateway, request, Right.CALL)
            stream = request.url.path.endswith("_stream")
            read = functools.partial(read_tgi, stream=stream)
            return await invoke(self._gateway, request, self._target(request), read=read)
        except ServiceError as error:
            return tgi_error(request, error)

    async def _session(
        self, request: Request, body: bytes, headers: Mapping[str, str]
    ) -> Response | None:
        """The answer to a body that opens or closes a session; None for one that is a model's."""
        kind = headers.get("content-type")
        fields = await off_loop(len(body), sessions.session_request, body, kind)
        id = request.headers.get(sessions.SESSION_ID)
        return await sessions.answer(self._gateway.sessions, fields, id)

    def _target(self, request: Request) -> str | None:
        """None where nothing but the body can name the model."""
        fields = (request.headers.get(name) for name in NAMING)
        target = next(filter(None, fields), request.query_params.get("model_name"))
        if target:
            return normal_name(header_text(target)).lstrip("/")
        if self._gateway.single_model is not None:
            return self._gateway.single_model
        attribute = MODEL_ATTRIBUTE.search(request.headers.get(CUSTOM_ATTRIBUTES, ""))
        return normal_name(unquote(attribute[1])).lstrip("/") if attribute else None

    async def endpoint(self, request: Request) -> Response:
        """As the platform in front of a container answers: a container's error is a ModelError."""
        request_id = request.state.request_id
        try:
            response = await self.invocations(request)
        except BadRequest as error:
            return _typed_error(400, "ValidationError", {"Message": error.message}, request_id)
        except ServiceError as error:
            if error.status == 404:
                return _typed_error(400, "ValidationError", {"Message": error.message}, request_id)
            response = JSONResponse(error.to_body(), error.status)
        if response.status_code >= 400:
            body = bytes(response.body[: LARGE_BYTES + 1])
            text = cut(body.decode("utf-8", "replace"), LARGE_BYTES)
            side = "client" if response.status_code < 500 else "server"
            fields = {
                "ErrorCode": "MODEL_ERROR",
                "Message": f"Received {side} error ({response.status_code}) from model: {text}",
                "OriginalMessage": text,
                "OriginalStatusCode": response.status_code,
                "LogStreamArn": "",
            }
            return _typed_error(424, "ModelError", fields, request_id)
        response.headers["x-amzn-invoked-production-variant"] = "AllTraffic"
        response.headers["x-amzn-requestid"] = request_id
        return response

    async def endpoint_stream(self, request: Request) -> Response:
        """The same with the answer in the AWS protocols' event stream."""
        response = await self.endpoint(request)
        if response.status_code >= 400:
            return response
        headers = response.headers
        headers["x-amzn-sagemaker-content-type"] = headers["content-type"]
        headers["content-type"] = EVENT_STREAM
        if isinstance(response, TokenStream):
            response.frame = payload_part
            response.body_iterator = (payload_part(piece) async for piece in response.body_iterator)
            return response
        del headers["content-length"]
        return Response(payload_part(bytes(response.body)), 200, dict(headers))


def _typed_error(status: int, kind: str, body: dict[str, object], request_id: str) -> Response:
    headers = {"x-amzn-errortype": kind, "x-amzn-requestid": request_id}
    return Response(
        json.dumps(body, ensure_ascii=False), status, headers, media_type="application/json"
    )
