"""The Open Inference Protocol (V2), for models of tensors and of texts.

GET  /v2, /v2/health/live, /v2/health/ready
GET  /v2/models/{name}                 the model's inputs and outputs; loads the model
GET  /v2/models/{name}/ready, /config, /stats
POST /v2/models/{name}/infer
POST /v2/models/{name}/generate, /generate_stream   see `serving.api.v2.generate`
     /v2/models/{name}/versions/{version}/...       the same for the version that is loaded
GET  /v2/models/stats                               see `serving.api.v2.statistics`
POST /v2/repository/...                             see `serving.api.v2.repository`

Workers implement the protocol (`handlers.tensors.v2`). Here are its routes, its errors and the
header with the length of the JSON in front of binary tensors, which a worker gets in the content
type.

https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import JSONResponse, Response

from common.errors import cut
from common.hints import timeout_s
from common.media_types import BINARY, HEADER_SIZE, JSON
from serving.api.access import Right
from serving.api.gateway import Gateway
from serving.api.invoke import Direct, check_version, describe, invoke
from serving.api.naming import described_models, may_call
from serving.api.request import Request
from serving.api.request_body import LARGE_BYTES
from serving.api.routing import CALL, EVENTS, FIND, Kind, Route
from serving.api.v2 import repository
from serving.api.v2.generate import generate
from serving.api.v2.statistics import statistics
from serving.errors import BadRequest, ResourceNotFound, Unavailable
from serving.models.model import State

NAME, VERSION = "kogpt2-serving", "0.1.0"
BYTES = "application/octet-stream"
HEADER_LENGTH = "inference-header-content-length"
# A `timeout`, and the beginning of the `parameters` that it is in. A quote inside a JSON string has
# a backslash before it.
TIMEOUT = re.compile(rb'"timeout"\s*:\s*(\d{1,18})\s*[,}]')
PARAMETERS = re.compile(rb'(?<!\\)"parameters"\s*:\s*\{[^{}]*$')
MAX_TIMEOUTS, NEAR = 8, 4096  # how many are looked at, and how many bytes before each


async def server(gateway: Gateway, request: Request) -> Response:
    """The server's name and extensions."""
    extensions = ["binary_tensor_data", "generate", "model_configuration"]
    extensions += ["model_repository", "statistics"]
    return JSONResponse({"name": NAME, "version": VERSION, "extensions": extensions})


async def live(gateway: Gateway, request: Request) -> Response:
    """Answer 200 as long as the server answers."""
    return JSONResponse({"live": True})


async def ready(gateway: Gateway, request: Request) -> Response:
    """Answer 200 when a request would work, as /ping."""
    gateway.check_health()
    return JSONResponse({"ready": True})


async def model_ready(gateway: Gateway, request: Request) -> Response:
    """Answer 200 when the model is loaded; load nothing."""
    name = request.path_params["name"]
    gateway.check_health()
    for named in described_models(gateway, name):
        model = await gateway.find(named)
        if model is None:
            raise Unavailable(f"Model {named} is not loaded yet; a request to it loads it")
        if model.state is not State.READY:
            raise Unavailable(f"Model {named} is {model.state.value}")
        check_version(request, model)
    return JSONResponse({"name": name, "ready": True})


async def describe_model(gateway: Gateway, request: Request) -> Response:
    """The model's inputs and outputs; loads it."""
    return JSONResponse(await _metadata(gateway, request))


async def infer(gateway: Gateway, request: Request) -> Response:
    """Tensors in, tensors out."""
    headers = {"content-type": JSON, "accept": "*/*"}
    length = request.headers.get(HEADER_LENGTH)
    if length is not None:
        if not (length.isascii() and length.isdecimal() and len(length) < 16):
            raise BadRequest(f"{HEADER_LENGTH} must be a number of bytes")
        headers["content-type"] = f"{BINARY};{HEADER_SIZE}={length}"

    def read(request: Request, body: bytes, _: Mapping[str, str]) -> Direct:
        return Direct(limit_s=_limit_s(body if length is None else body[: int(length)]))

    name = request.path_params["name"]
    response = await invoke(gateway, request, name, read, headers)
    if response.status_code >= 400:
        return _as_error(response)
    kind, _, size = response.headers["content-type"].partition(f";{HEADER_SIZE}=")
    if kind == BINARY:
        response.headers["content-type"] = BYTES
        response.headers[HEADER_LENGTH] = size
    return response


async def generate_whole(gateway: Gateway, request: Request) -> Response:
    """Continue a text."""
    return await generate(gateway, request, False)


async def generate_stream(gateway: Gateway, request: Request) -> Response:
    """Continue a text, in server-sent events."""
    return await generate(gateway, request, True)


async def config(gateway: Gateway, request: Request) -> Response:
    """The model's inputs and outputs, as Triton describes them; loads it."""
    described = await _metadata(gateway, request)
    sides = {"input": described["inputs"], "output": described["outputs"]}
    tensors = {side: [_configured(t) for t in listed] for side, listed in sides.items()}
    head = {"name": described["name"], "platform": described["platform"], "max_batch_size": 0}
    policy = {"latest": {"num_versions": 1}}
    return JSONResponse({**head, "version_policy": policy, **tensors})


async def model_statistics(gateway: Gateway, request: Request) -> Response:
    """Count of requests to a loaded model, and their times."""
    named = described_models(gateway, request.path_params["name"])
    models = [gateway.registry.get(model) for model in named]
    for model in models:
        check_version(request, model)
    return JSONResponse(await statistics(gateway, models))


async def all_statistics(gateway: Gateway, request: Request) -> Response:
    """Count of requests to each loaded model, and their times."""
    models = [m for m in gateway.registry.models() if may_call(gateway, request, m.name)]
    return JSONResponse(await statistics(gateway, models))


async def no_traces(gateway: Gateway, request: Request) -> Response:
    raise ResourceNotFound("there are no trace settings; OTEL_EXPORTER_OTLP_ENDPOINT starts traces")


def _limit_s(body: bytes) -> float:
    """Return the `timeout` in a request's body in seconds, infinity without one.

    It is searched for: parsing tensors of megabytes would hold the interpreter's lock, and with it
    the event loop, for up to a second. What is wrong, the worker reports.
    """
    for match in itertools.islice(TIMEOUT.finditer(body), MAX_TIMEOUTS):
        if PARAMETERS.search(body, max(match.start() - NEAR, 0), match.start()):
            return timeout_s({"timeout": int(match[1])}) or math.inf
    return math.inf


async def _metadata(gateway: Gateway, request: Request) -> dict[str, Any]:
    """Load the path's model; return its metadata, with defaults for models with their own code."""
    model = await describe(gateway, request)
    known = {"name": "", "versions": ["1"], "platform": "", "inputs": [], "outputs": []}
    return {**known, **model.metadata, "name": model.name}


def _configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    kind = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    return {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"]}


def _as_error(response: Response) -> Response:
    """Rewrite a worker's error in the format of the protocol, with the same status."""
    body = bytes(response.body[: LARGE_BYTES + 1])
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):  # an error of a model's own code, in any format
        message = cut(body.decode("utf-8", "replace"), LARGE_BYTES)
    response.body = orjson.dumps({"error": message.encode("utf-8", "backslashreplace").decode()})
    response.headers["content-type"] = JSON
    response.headers["content-length"] = str(len(response.body))
    return response


V2 = Kind("V2", Right.CALL, "V2Error")
HEALTH = Kind("V2", None, "V2Error")
INFER = Kind(
    "V2", Right.CALL, "V2Error",
    {JSON: "Infer", BYTES: "Bytes"},
    {JSON: ("Inferred", "Generated", "Guide"), BYTES: "Bytes"},  # of texts, as they were sent
)  # fmt: skip
GENERATE = Kind("V2", Right.CALL, "V2Error", {JSON: "V2Generate"}, {JSON: "Any", EVENTS: "Any"})
MODEL = "/v2/models/{name:model}"
PATHS = MODEL + "/versions/{version}", MODEL
ROUTES = (
    Route("GET", "/v2", server, HEALTH),
    Route("GET", "/v2/health/live", live, HEALTH),
    Route("GET", "/v2/health/ready", ready, HEALTH, "503"),
    *repository.ROUTES,
    Route("GET", "/v2/models/stats", all_statistics, V2, "401 403 429 503"),
    *(
        route
        for path in PATHS
        for route in (
            Route("POST", f"{path}/infer", infer, INFER, CALL),
            Route("POST", f"{path}/generate", generate_whole, GENERATE, CALL),
            Route("POST", f"{path}/generate_stream", generate_stream, GENERATE, CALL),
            Route("GET", f"{path}/ready", model_ready, V2, "400 401 403 404 429 503"),
            Route("GET", f"{path}/config", config, V2, CALL),
            Route("GET", f"{path}/stats", model_statistics, V2, FIND),
        )
    ),
    *(Route("GET POST", f"{path}/trace/setting", no_traces) for path in ("/v2", MODEL)),
    *(Route("GET", path, describe_model, V2, CALL) for path in PATHS),
)
