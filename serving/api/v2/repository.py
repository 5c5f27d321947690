"""The Open Inference Protocol's model repository: lists, loads and unloads models.

POST /v2/repository/index                      {"ready"?}
POST /v2/repository/models/{name}/load
POST /v2/repository/models/{name}/unload

KServe's agent and Seldon Core's scheduler call these routes. If models are loaded on demand, the
next request to an unloaded model loads it again.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from common import fields
from serving.api.access import Right
from serving.api.gateway import Gateway
from serving.api.naming import listed_aliases, may_call
from serving.api.request import Request
from serving.api.request_body import read_json_object
from serving.api.routing import CALL, Kind, Route
from serving.errors import BadRequest
from serving.models.model import Model, State

STATES = {
    State.FETCHING: "LOADING",
    State.LOADING: "LOADING",
    State.READY: "READY",
    State.DRAINING: "UNLOADING",
}


async def index(gateway: Gateway, request: Request) -> Response:
    """The store's models and their states."""
    only_ready = (await read_object(gateway, request)).get("ready", False)
    fields.boolean("ready", only_ready)
    by_name = {model.name: _entry(model) for model in gateway.registry.all()}
    if not gateway.settings.sagemaker_multi_model and not only_ready:
        for stored in await gateway.lookups.models():
            unloaded = {"name": stored.name, "state": "UNAVAILABLE", "reason": "unloaded"}
            by_name.setdefault(stored.name, unloaded)
        for name in gateway.registry.requests():
            unloaded = {"name": name, "state": "UNAVAILABLE", "reason": "unloaded"}
            by_name.setdefault(name, unloaded)
    ready = {name for name, entry in by_name.items() if entry["state"] == "READY"}
    by_name = {name: entry for name, entry in by_name.items() if may_call(gateway, request, name)}
    by_name |= {n: _alias(n, of, ready) for n, of in listed_aliases(gateway, request).items()}
    entries = [by_name[name] for name in sorted(by_name)]
    return JSONResponse([e for e in entries if e["state"] == "READY" or not only_ready])


async def load(gateway: Gateway, request: Request) -> Response:
    """Load the store's model of this name, again where the store's has changed.

    The loaded version answers until the new one is ready, and stays if that does not load.
    """
    name = request.path_params["name"]
    for parameter in await _parameters(gateway, request):
        raise BadRequest(
            f"parameters.{parameter} is not known here: a model is loaded as it is in the store"
        )
    with gateway.metrics.loading():
        # No eviction where SageMaker unloads models.
        evict = not gateway.settings.sagemaker_multi_model
        await gateway.on_demand.refresh(name, evict=evict)
    return Response()


async def unload(gateway: Gateway, request: Request) -> Response:
    """Unload a model."""
    name = request.path_params["name"]
    for parameter in await _parameters(gateway, request):
        if parameter != "unload_dependents":  # no model here depends on another
            raise BadRequest(f"parameters.{parameter} is not known here")
    await gateway.registry.unload(name)
    return Response()


async def _parameters(gateway: Gateway, request: Request) -> Mapping[str, Any]:
    body = await read_object(gateway, request)
    return fields.mapping("parameters", body.get("parameters") or {})


def _alias(name: str, weights: Mapping[str, float], ready: set[str]) -> dict[str, Any]:
    """Return the entry of an alias, which is ready if all of its models are."""
    state = "READY" if ready.issuperset(weights) else "UNAVAILABLE"
    shown = ", ".join(f"{model} ({weight:g})" for model, weight in weights.items())
    return {"name": name, "version": "1", "state": state, "reason": f"an alias of {shown}"}


def _entry(model: Model) -> dict[str, Any]:
    state, reason = STATES[model.state], model.restarts.reason
    return {"name": model.name, "version": model.version, "state": state, "reason": reason}


async def read_object(gateway: Gateway, request: Request) -> dict[str, Any]:
    """Read a JSON object with any Content-Type, as the protocol's clients send none."""
    return await read_json_object(gateway, request, of_any_type=True)


LISTED, LOADED = (Kind("V2", right, "V2Error") for right in (Right.LIST, Right.LOAD))
MODEL = "/v2/repository/models/{name:model}"
ROUTES = (
    Route("POST", "/v2/repository/index", index, LISTED, "400 401 403 408 413 415 429 503"),
    Route("POST", f"{MODEL}/load", load, LOADED, CALL),
    Route("POST", f"{MODEL}/unload", unload, LOADED, CALL),
)
