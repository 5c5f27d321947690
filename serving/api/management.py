"""Loading, listing, describing, scaling and unloading of models.

SageMaker's multi-model contract and Multi Model Server's management API, which agree in these
routes: `POST /models`, `GET /models`, `GET|PUT|DELETE /models/{name}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
import unicodedata
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from common.errors import quoted
from common.media_types import JSON
from serving.api.gateway import Gateway
from serving.api.naming import (
    check_no_alias,
    listed_aliases,
    may_call,
    name_model,
    name_source,
)
from serving.api.request import Request
from serving.api.request_body import read_json_object
from serving.api.routing import FIND, LIST, LOAD, LOADING, Route
from serving.api.schemas import fields_of
from serving.errors import BadRequest, ModelNotFound, ServingError
from serving.mms.launcher import HANDLER
from serving.models import model_settings
from serving.models.model import LoadRequest, Model
from serving.models.model_settings import ModelSettings
from serving.names import model_name, normal_name

PAGE = 100
MAX_WORKERS = 64
MAX_TEXT = 1024
OWN_HANDLER = re.compile(r"(?:[\w-]+/){0,8}[\w-]+(?:\.py)?(?::[A-Za-z_]\w*)?", re.ASCII)
RUNTIMES = ("", "python", "python3")  # names of the only runtime of MMS that is available here
SETTINGS = set(model_settings.schema())
LOAD_PARAMETERS = fields_of("Load") | {"runtime", "preload_model"}  # those two without effect


async def load(gateway: Gateway, request: Request) -> Response:
    """Load a model."""
    body = await read_json_object(gateway, request)
    given = {**body, **request.query_params}
    for name in given:
        if name not in LOAD_PARAMETERS:
            raise BadRequest(f"{name} is not known; known are {', '.join(sorted(LOAD_PARAMETERS))}")
    url, name = _text(given, "url"), _text(given, "model_name")
    if not url:
        raise BadRequest("Parameter url is required.")
    name_source(gateway, request, url)
    if name:
        name_model(gateway, request, normal_name(name))
    # Only options in the request are passed on: the others follow from the model's files.
    limits = {
        "initial_workers": (1, MAX_WORKERS),
        "batch_size": (1, 1024),
        "max_batch_delay": (0, 600_000),
    }
    options: dict[str, Any] = {
        option: _integer(given, option, *limit, limit[0])
        for option, limit in limits.items()
        if option in given
    }
    if _text(given, "runtime") not in RUNTIMES:
        known = ", ".join(filter(None, RUNTIMES))
        raise BadRequest(f"runtime is {quoted(given['runtime'])}, can be {known}")
    if "response_timeout" in given:  # the name of timeout_s in MMS
        options["response_timeout"] = _integer(given, "response_timeout", 1, 3600, 1)
        given.setdefault("timeout_s", options["response_timeout"])
    settings = ModelSettings.parse({k: v for k, v in given.items() if k in SETTINGS})
    if given.get("handler") not in (None, "", HANDLER):
        options["handler"] = _handler(_text(given, "handler"))
    if settings.base is not None:
        name_source(gateway, request, settings.base)
    wait = _boolean(given, "synchronous", True)
    with gateway.metrics.loading():
        stored = await gateway.lookups.locate(url, options.get("handler"))
        if not name:
            limit_s = gateway.settings.load_timeout_s
            name = await gateway.registry.fetches.manifest_name(stored, limit_s) or stored.name
        name = model_name(name)
    name_model(gateway, request, name)
    check_no_alias(gateway, name)
    load = gateway.registry.load(name, LoadRequest(url, settings, options), stored)
    counted = gateway.registry.spawn(gateway.metrics.loaded(load))
    if wait:
        model = await asyncio.shield(counted)
        warnings = {"warnings": model.warnings} if model.warnings else {}
        return JSONResponse({"status": "Workers scaled", **warnings})
    return JSONResponse({"status": "Processing worker updates..."}, 202)


async def list_models(gateway: Gateway, request: Request) -> Response:
    """List the loaded models; with `available=true` what the store offers."""
    query = request.query_params
    limit = min(_integer(query, "limit", 1, 10**9, PAGE), PAGE)
    start = _integer(query, "next_page_token", 0, 10**9, 0)
    if _boolean(query, "available", False):
        return JSONResponse(await _available(gateway, request) | _aliases(gateway, request, start))
    models = [m for m in gateway.registry.models() if may_call(gateway, request, m.name)]
    page = [_listed(request, model) for model in models[start : start + limit]]
    answer: dict[str, Any] = {"models": page, **_aliases(gateway, request, start)}
    if start + limit < len(models):
        answer["nextPageToken"] = str(start + limit)
    return JSONResponse(answer)


def _aliases(gateway: Gateway, request: Request, start: int) -> dict[str, Any]:
    """Return the field `aliases` of a page: the first page has all aliases, if there are any."""
    aliases = listed_aliases(gateway, request) if start == 0 else {}
    return {"aliases": aliases} if aliases else {}


async def _available(gateway: Gateway, request: Request) -> dict[str, Any]:
    """Return the store's models, each with its size and whether it is loaded."""
    stored = await gateway.lookups.models()
    loaded = {model.name for model in gateway.registry.models()}
    return {
        "models": [
            {
                "modelName": model.name,
                "modelUrl": model.url,
                "sizeBytes": model.size_bytes,
                "loaded": model.name in loaded,
            }
            for model in stored
            if may_call(gateway, request, model.name)
        ]
    }


async def describe(gateway: Gateway, request: Request) -> Response:
    """Describe a model."""
    name = request.path_params["name"]
    alias = gateway.aliases.find(name)
    if alias is not None and gateway.registry.find(name) is None:
        return JSONResponse({"modelName": name, "aliasOf": alias.weights})
    model = gateway.registry.get(name)
    described: dict[str, Any] = {}
    with contextlib.suppress(ServingError, ValueError):
        described = await gateway.mms.describe(model.id)
    described |= _listed(request, model)
    if model.whole_because and _shows_base(request, model):
        described["wholeBecause"] = model.whole_because
    if alias is not None:
        described["aliasOf"] = alias.weights
    described["settings"] = model.settings.values()
    restarts = model.restarts
    if restarts.reason:
        wait_s = round(max(restarts.next_at - time.monotonic(), 0), 1)
        described["restart"] = {"failures": restarts.failures, "reason": restarts.reason}
        described["restart"]["retryInSeconds"] = wait_s
    return JSONResponse(described)


async def scale(gateway: Gateway, request: Request) -> Response:
    """Change how many requests are passed on to a model at once, or pin it.

    ?min_worker=N&max_worker=M: requests in flight at once; ?pinned=true: it is not evicted
    """
    model = gateway.registry.get(request.path_params["name"])
    query = request.query_params
    if "pinned" in query:
        pinned = _boolean(query, "pinned", False)
        model.settings = dataclasses.replace(model.settings, pinned=pinned)
        known = gateway.registry.request(model.name) or LoadRequest(model.stored.name)
        settings = dataclasses.replace(known.settings, pinned=pinned)
        gateway.registry.remember(model.name, dataclasses.replace(known, settings=settings))
        model.set()
        await gateway.registry.save()
        if not {"min_worker", "max_worker"} & query.keys():
            return JSONResponse({"status": f"Model pinned: {str(pinned).lower()}"})
    low = _integer(query, "min_worker", 1, MAX_WORKERS, 1)
    high = _integer(query, "max_worker", low, MAX_WORKERS, max(low, 1))
    # MMS closes connections that have a request, and the request would be repeated: none may run.
    async with gateway.admission.paused(model.line, model.request_timeout_s):
        if gateway.registry.find(model.name) is not model:  # unloaded or replaced meanwhile
            raise ModelNotFound(f"Model {model.name} was unloaded")
        await gateway.mms.scale(model.id, low, high, gateway.settings.load_timeout_s)
        model.connections = low
        model.line.capacity = low * model.batch_size
    # The options apply to the next start of the model's workers.
    model.options = {**model.options, "initial_workers": low}
    known = gateway.registry.request(model.name) or LoadRequest(model.stored.name)
    options = {**known.options, "initial_workers": low}
    gateway.registry.remember(model.name, dataclasses.replace(known, options=options))
    await gateway.registry.save()
    return JSONResponse({"status": "Workers scaled"})


async def unload(gateway: Gateway, request: Request) -> Response:
    """Unload a model; answer once its memory is free."""
    name = request.path_params["name"]
    await gateway.registry.unload(name)
    return JSONResponse({"status": f'Model "{name}" unregistered'})


def _listed(request: Request, model: Model) -> dict[str, str]:
    """Return a model's entry in lists: name, URL, shared base, a classifier's task, residency."""
    shown = {"modelName": model.name, "modelUrl": model.url}
    if model.shared_base is not None and _shows_base(request, model):
        shown["baseModel"] = model.shared_base.name
    if model.task:
        shown["task"] = model.task
    return {**shown, "residency": model.residency} if model.residency else shown


def _shows_base(request: Request, model: Model) -> bool:
    """Return whether the request's token may use the model's base."""
    token, base = request.state.token, model.stored_base
    return token is None or base is None or token.may_call(base.name)


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be text")
    if len(value) > MAX_TEXT or any(unicodedata.category(c) == "Cc" for c in value):
        raise BadRequest(f"{name} must have at most {MAX_TEXT} characters and no control ones")
    return value


def _handler(value: str) -> str:
    """Check a handler, `module` or `module:function` of the model's own files; return it."""
    if not OWN_HANDLER.fullmatch(value):
        raise BadRequest(
            f"handler is {quoted(value)}, must be a Python file of the model and what in it"
            " answers: service:handle, service.py or path/service.py:Class"
        )
    return value


def _integer(given: Mapping[str, Any], name: str, low: int, high: int, default: int) -> Any:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return model_settings.checked(name, given.get(name, default), schema)


def _boolean(given: Mapping[str, Any], name: str, default: bool) -> Any:
    return model_settings.checked(name, given.get(name, default), {"type": "boolean"})


ROUTES = (
    Route("POST", "/models", load, dataclasses.replace(LOAD, sent={JSON: "Load"}), LOADING),
    Route(
        "GET", "/models", list_models, LIST, "400 401 403 429 503",
        "limit=integer&next_page_token=string&available=boolean",
    ),
    Route("GET", "/models/{name:model}", describe, LIST, "401 403 404 429"),
    Route(
        "PUT", "/models/{name:model}", scale, LOAD, "400 " + FIND,
        "min_worker=integer&max_worker=integer&pinned=boolean",
    ),
    Route("DELETE", "/models/{name:model}", unload, LOAD, FIND),
)  # fmt: skip
