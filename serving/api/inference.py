"""Routes that call models: SageMaker's, Multi Model Server's, TGI's, and the AWS client's.

POST /models/{name}/invoke            SageMaker multi-model
POST /invocations                     X-Amzn-SageMaker-Adapter-Identifier or -Target-Model,
                                      ?model_name=, model=NAME in the custom attributes, or `model`
                                      in a body of OpenAI's; else the one model of a single-model
                                      endpoint
POST /predictions/{name}              Multi Model Server; OPTIONS describes it
POST /generate, /generate_stream      TGI's; `parameters.adapter_id`, or what /invocations has
POST /endpoints/{name}/invocations    boto3's sagemaker-runtime with `endpoint_url` set to here
POST /endpoints/{name}/invocations-response-stream
GET  /ping
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import unquote

import orjson
from starlette.responses import Response, StreamingResponse

from common.errors import InvalidRequest, ServiceError, UnsupportedMediaType, cut
from common.json_body import MAX_VALUES, read_json
from common.media_types import CSV, JSON, JSON_LINES, TEXT, media_type
from serving.api.access import Right
from serving.api.answering import TokenStream
from serving.api.bodies import read, read_tgi
from serving.api.error_responses import error_response
from serving.api.event_stream import EVENT_STREAM, payload_part
from serving.api.gateway import Gateway
from serving.api.invoke import invoke
from serving.api.json_lines import invoke_lines, is_lines
from serving.api.request import Request
from serving.api.request_body import LARGE_BYTES, header_text, off_loop
from serving.api.routing import CALL, EVENTS, Kind, Route
from serving.api.stream import LINES
from serving.api.worker_calls import CUSTOM_ATTRIBUTES, TARGET_MODEL
from serving.errors import BadRequest
from serving.names import normal_name

# The model's name in the custom attributes: AWS's calls for a stream have no TargetModel.
MODEL_ATTRIBUTE = re.compile(r"(?:^|[\s,;])model=([^\s,;]+)")
INFERENCE_COMPONENT = "x-amzn-sagemaker-inference-component"
ADAPTER = "x-amzn-sagemaker-adapter-identifier"
SESSION_ID = "x-amzn-sagemaker-session-id"
SESSION_REQUESTS = ("NEW_SESSION", "CLOSE")
NO_SESSIONS = (
    "this server has no stateful sessions: leave out requestType and X-Amzn-SageMaker-Session-Id,"
    " and send the whole prompt each time; the prefix cache has its beginning"
)
# Headers of /invocations that may name the model; the first one present counts.
NAMING = (ADAPTER, TARGET_MODEL, INFERENCE_COMPONENT)


async def named(gateway: Gateway, request: Request) -> Response:
    """Continue a prompt or classify texts, or those of each line of JSON lines."""
    answer = invoke_lines if is_lines(request) else invoke
    return await answer(gateway, request, request.path_params["name"], read)


async def invocations(gateway: Gateway, request: Request) -> Response:
    """Continue a prompt or classify texts (SageMaker)."""
    answer = invoke_lines if is_lines(request) else invoke
    return await answer(gateway, request, _target(request), read, check=_check_no_session)


async def generate(gateway: Gateway, request: Request) -> Response:
    """Continue a text, as Hugging Face's TGI does."""
    stream = request.url.path.endswith("_stream")
    read = functools.partial(read_tgi, stream=stream)
    return await invoke(gateway, request, _target(request), read)


async def _check_no_session(request: Request, body: bytes, headers: Mapping[str, str]) -> None:
    """Raise `BadRequest` for a request of SageMaker's stateful sessions."""
    kind = headers.get("content-type")
    if await off_loop(len(body), _is_session, body, kind) or request.headers.get(SESSION_ID):
        raise BadRequest(NO_SESSIONS)


def _is_session(body: bytes, content_type: str | None) -> bool:
    """Return whether a body opens or closes a session; a script may have another requestType."""
    if b'"requestType"' not in body:
        return False
    with suppress(InvalidRequest, UnsupportedMediaType):  # the model reports the error
        value = read_json(body, MAX_VALUES) if media_type(content_type)[0] == JSON else None
        return isinstance(value, dict) and value.get("requestType") in SESSION_REQUESTS
    return False


def _target(request: Request) -> str | None:
    """Return the model that headers or query name; None if only the body can."""
    fields = (request.headers.get(name) for name in NAMING)
    target = next(filter(None, fields), request.query_params.get("model_name"))
    if target:
        return normal_name(header_text(target)).lstrip("/")
    attribute = MODEL_ATTRIBUTE.search(request.headers.get(CUSTOM_ATTRIBUTES, ""))
    return normal_name(unquote(attribute[1])).lstrip("/") if attribute else None


async def endpoint(gateway: Gateway, request: Request) -> Response:
    """Continue a prompt, as SageMaker's runtime answers (boto3): an error is a ModelError."""
    request_id = request.state.request_id
    try:
        response = await invocations(gateway, request)
    except ServiceError as error:
        counted = request.state.counted
        reached = counted is not None and counted.model
        if not reached and (isinstance(error, BadRequest) or error.status == 404):
            return _typed_error(400, "ValidationError", {"Message": error.message}, request_id)
        response = error_response(request, error)
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


async def endpoint_stream(gateway: Gateway, request: Request) -> Response:
    """Continue a prompt, as SageMaker's runtime streams it, in AWS's event stream."""
    response = await endpoint(gateway, request)
    if response.status_code >= 400:
        return response
    headers = response.headers
    headers["x-amzn-sagemaker-content-type"] = headers["content-type"]
    headers["content-type"] = EVENT_STREAM
    if isinstance(response, TokenStream):
        response.frame = payload_part
    if isinstance(response, StreamingResponse):
        response.body_iterator = (payload_part(piece) async for piece in response.body_iterator)
        return response
    del headers["content-length"]
    return Response(payload_part(bytes(response.body)), 200, dict(headers))


def _typed_error(status: int, kind: str, body: dict[str, object], request_id: str) -> Response:
    headers = {"x-amzn-errortype": kind, "x-amzn-requestid": request_id}
    return Response(orjson.dumps(body), status, headers, media_type=JSON)


PROMPTS = ("Generate", "OpenAICompletion", "OpenAIChat", "Text")
TO_TGI = {JSON: PROMPTS, TEXT: "Text"}
TEXTS_SENT = (*PROMPTS, "Classify")
SENT = {JSON: TEXTS_SENT, TEXT: "Text", CSV: "Text", JSON_LINES: "Lines"}
ANY = "Any"  # a model's own code answers anything, and a stream has no schema
OF_TGI = {JSON: ("Generated", "Guide", ANY), TEXT: "Text", EVENTS: ANY, LINES: ANY, "*/*": ANY}
OF_MODELS = ("Generated", "Guide", "Labels", "Label", ANY)
ANSWERED = {**OF_TGI, JSON: OF_MODELS, CSV: "Text", JSON_LINES: "Lines"}
ERRORS = ("Error", "OpenAIError")
TGI = Kind("inference", Right.CALL, ERRORS, TO_TGI, OF_TGI)
TEXTS = Kind("inference", Right.CALL, ERRORS, SENT, ANSWERED)
ENDPOINT = Kind("inference", Right.CALL, "AWSError", SENT, {"*/*": ANY})
STREAMED = "/endpoints/{endpoint}/invocations-response-stream"
ROUTES = (
    Route("POST", "/models/{name:model}/invoke", named, TEXTS, CALL),
    Route("POST GET PUT", "/predictions/{name:model}", named, TEXTS, CALL),
    Route("POST", "/invocations", invocations, TEXTS, CALL),
    Route("POST", "/generate", generate, TGI, CALL),
    Route("POST", "/generate_stream", generate, TGI, CALL),
    Route("POST", "/endpoints/{endpoint}/invocations", endpoint, ENDPOINT, "400 424 500"),
    Route("POST", STREAMED, endpoint_stream, ENDPOINT, "400 424 500"),
)
