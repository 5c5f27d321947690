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

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import quoted
from serving.api.naming import (
    check_no_alias,
    listed_aliases,
    may_call,
    name_model,
    name_source,
)
from serving.api.shared import Gateway, Right, check_token, read_json_object
from serving.errors import BadRequest, ServingError
from serving.mms.launcher import HANDLER
from serving.models import model_settings
from serving.models.model import Model
from serving.models.model_settings import ModelSettings
from serving.names import model_name, normal_name
from serving.store import public_url

PAGE = 100
MAX_WORKERS = 64
MAX_TEXT = 1024
OWN_HANDLER = re.compile(r"(?:[\w-]+/){0,8}[\w-]+(?:\.py)?(?::[A-Za-z_]\w*)?", re.ASCII)
RUNTIMES = ("", "python", "python3")  # of those that MMS knows the one that is here
SETTINGS = set(model_settings.schema())
LOAD_PARAMETERS = SETTINGS | {
    "model_name", "url", "handler", "runtime", "batch_size", "max_batch_delay", "initial_workers",
    "synchronous", "response_timeout", "preload_model",
}  # fmt: skip


class Management:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return [
            Route("/models", self.load, methods=["POST"]),
            Route("/models", self.list, methods=["GET"]),
            Route("/models/{name:model}", self.describe, methods=["GET"]),
            Route("/models/{name:model}", self.scale, methods=["PUT"]),
            Route("/models/{name:model}", self.unload, methods=["DELETE"]),
        ]

    async def load(self, request: Request) -> Response:
        gateway = self._gateway
        check_token(gateway, request, Right.LOAD)
        gateway.check_ready()
        body = await read_json_object(gateway, request)
        given = {**body, **request.query_params}
        for name in given:
            if name not in LOAD_PARAMETERS:
                raise BadRequest(
                    f"{name} is not known; known are {', '.join(sorted(LOAD_PARAMETERS))}"
                )
        url, name = _text(given, "url"), _text(given, "model_name")
        if not url:
            raise BadRequest("Parameter url is required.")
        name_source(gateway, request, url)
        if name:
            name_model(gateway, request, normal_name(name))
        # Of these only what is given: the rest follows from what the model holds.
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
        options["response_timeout"] = _integer(
            given, "response_timeout", 1, 3600, gateway.settings.request_timeout_s
        )
        if _text(given, "runtime") not in RUNTIMES:
            known = ", ".join(filter(None, RUNTIMES))
            raise BadRequest(f"runtime is {quoted(given['runtime'])}, can be {known}")
        if "response_timeout" in given:  # another name for it
            given.setdefault("timeout_s", options["response_timeout"])
        settings = ModelSettings.parse({k: v for k, v in given.items() if k in SETTINGS})
        if given.get("handler") not in (None, "", HANDLER):
            options["handler"] = _handler(_text(given, "handler"))
        if settings.base is not None:
            name_source(gateway, request, settings.base)
        wait = _boolean(given, "synchronous", True)
        with gateway.metrics.loading():
            stored = await gateway.lookups.locate(url, options.get("handler"))
            name = model_name(name or await gateway.registry.manifest_name(stored) or stored.name)
        name_model(gateway, request, name)
        check_no_alias(gateway, name)
        load = gateway.registry.begin(name, public_url(url), stored, settings, **options)
        counted = gateway.registry.spawn(gateway.metrics.loaded(load))
        if wait:
            await asyncio.shield(counted)
            return JSONResponse({"status": "Workers scaled"})
        return JSONResponse({"status": "Processing worker updates..."}, 202)

    async def list(self, request: Request) -> Response:
        gateway, query = self._gateway, request.query_params
        check_token(gateway, request, Right.LIST)
        limit = min(_integer(query, "limit", 1, 10**9, PAGE), PAGE)
        start = _integer(query, "next_page_token", 0, 10**9, 0)
        if _boolean(query, "available", False):
            return JSONResponse(await self._available(request) | self._aliases(request, start))
        models = [m for m in gateway.registry.models() if may_call(request, m.name)]
        page = [_listed(model) for model in models[start : start + limit]]
        answer: dict[str, Any] = {"models": page, **self._aliases(request, start)}
        if start + limit < len(models):
            answer["nextPageToken"] = str(start + limit)
        return JSONResponse(answer)

    def _aliases(self, request: Request, start: int) -> dict[str, Any]:
        """All of them stand on the first page, where there are any."""
        aliases = listed_aliases(self._gateway, request) if start == 0 else {}
        return {"aliases": aliases} if aliases else {}

    async def _available(self, request: Request) -> dict[str, Any]:
        """What the store offers, and what of it is loaded."""
        gateway = self._gateway
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
                if may_call(request, model.name)
            ]
        }

    async def describe(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.LIST)
        name = request.path_params["name"]
        name_model(self._gateway, request, name)
        alias = self._gateway.aliases.find(name)
        if alias is not None and self._gateway.registry.find(name) is None:
            return JSONResponse({"modelName": name, "aliasOf": alias.weights})
        model = self._gateway.registry.get(name)
        described: dict[str, Any] = {}
        with contextlib.suppress(ServingError, ValueError):
            described = await self._gateway.mms.describe(model.id)
        described |= _listed(model)
        if alias is not None:
            described["aliasOf"] = alias.weights
        described["settings"] = model.settings.values()
        restarts = model.restarts
        if restarts.reason:
            wait_s = round(max(restarts.next_at - time.monotonic(), 0), 1)
            described["restart"] = {"failures": restarts.failures, "reason": restarts.reason}
            described["restart"]["retryInSeconds"] = wait_s
        return JSONResponse(described)

    async def scale(self, request: Request) -> Response:
        """`PUT /models/{name}`.

        ?min_worker=N&max_worker=M: requests in flight at once; ?pinned=true: it is not evicted
        """
        gateway = self._gateway
        check_token(gateway, request, Right.LOAD)
        name = request.path_params["name"]
        name_model(gateway, request, name)
        check_no_alias(gateway, name)
        gateway.check_ready()
        model = gateway.registry.get(name)
        query = request.query_params
        if "pinned" in query:
            pinned = _boolean(query, "pinned", False)
            model.settings = dataclasses.replace(model.settings, pinned=pinned)
            gateway.registry.save()
            model.set()
            if not {"min_worker", "max_worker"} & query.keys():
                return JSONResponse({"status": f"Model pinned: {str(pinned).lower()}"})
        low = _integer(query, "min_worker", 1, MAX_WORKERS, 1)
        high = _integer(query, "max_worker", low, MAX_WORKERS, max(low, 1))
        await gateway.mms.scale(model.id, low, high, gateway.settings.load_timeout_s)
        # For the next start of its workers.
        model.options = {**model.options, "initial_workers": low}
        model.connections = low
        model.line.capacity = low * model.batch_size
        gateway.registry.save()
        return JSONResponse({"status": "Workers scaled"})

    async def unload(self, request: Request) -> Response:
        check_token(self._gateway, request, Right.LOAD)
        name = request.path_params["name"]
        name_model(self._gateway, request, name)
        check_no_alias(self._gateway, name)
        self._gateway.check_ready()
        await self._gateway.registry.unload(name)
        return JSONResponse({"status": f'Model "{name}" unregistered'})


def _listed(model: Model) -> dict[str, str]:
    """What SageMaker's contract has, an adapter's base, and where the engine has the weights."""
    shown = {"modelName": model.name, "modelUrl": model.url}
    if model.stored_base is not None:
        shown["baseModel"] = model.stored_base.name
    return {**shown, "residency": model.residency} if model.residency else shown


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be text")
    if len(value) > MAX_TEXT or any(unicodedata.category(c) == "Cc" for c in value):
        raise BadRequest(f"{name} must have at most {MAX_TEXT} characters and no control ones")
    return value


def _handler(value: str) -> str:
    """`module` or `module:function`, a file of the model's own."""
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
