"""SageMaker's adapter inference components: adapters beside the container's one model, their base.

POST   /adapters             {"name", "src", "preload"?, "pin"?}
DELETE /adapters/{name}
POST   /invocations          X-Amzn-SageMaker-Adapter-Identifier names the adapter that answers

AWS publishes the contract in model-hosting-container-standards. An adapter is a model like any
other: all other routes accept its name, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse, Response

from common.media_types import JSON, TEXT
from serving.api.gateway import Gateway
from serving.api.naming import check_no_alias, name_model, name_source
from serving.api.request import Request
from serving.api.request_body import read_json_object
from serving.api.routing import FIND, LOAD, LOADING, Route
from serving.errors import BadRequest, ModelNotFound
from serving.models.model import LoadRequest
from serving.models.model_settings import ModelSettings
from serving.names import model_name

FIELDS = {"name": str, "src": str, "preload": bool, "pin": bool}


async def register(gateway: Gateway, request: Request) -> Response:
    """Load an adapter beside the one model (SageMaker's adapter inference components).

    Without `preload` the answer does not wait for that.
    """
    body = _checked(await read_json_object(gateway, request))
    name, src = model_name(body["name"]), body["src"]
    name_model(gateway, request, name)
    check_no_alias(gateway, name)
    name_source(gateway, request, src)
    with gateway.metrics.loading():
        stored = await gateway.lookups.locate(src)
    # On a server without a single model, the adapter's own files name its base.
    base = str(Path(gateway.settings.base_dir, "model")) if gateway.single_model else None
    settings = ModelSettings(base=base, pinned=body.get("pin"))
    load = gateway.registry.load(name, LoadRequest(src, settings), stored)
    counted = gateway.registry.spawn(gateway.metrics.loaded(load))
    if body.get("preload", True):
        await asyncio.shield(counted)
    return PlainTextResponse(f"Adapter {name} registered")


async def unregister(gateway: Gateway, request: Request) -> Response:
    """Unload an adapter."""
    name = request.path_params["name"]
    model = gateway.registry.find(name)
    if model is None or not model.is_adapter:
        raise ModelNotFound(f"The adapter {name} was not found")
    await gateway.registry.unload(name)
    return PlainTextResponse(f"Adapter {name} unregistered")


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    for field, value in body.items():
        if field not in FIELDS:
            raise BadRequest(f"{field[:100]} is not known; known are {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[field]):
            kind = "text" if FIELDS[field] is str else "true or false"
            raise BadRequest(f"{field} must be {kind}")
    for field in ("name", "src"):
        if not body.get(field):
            raise BadRequest(f"{field} must be text that is not empty")
    return body


ADAPTER = dataclasses.replace(LOAD, sent={JSON: "Adapter"}, answered={TEXT: "Text"})
ROUTES = (
    Route("POST", "/adapters", register, ADAPTER, LOADING),
    Route("DELETE", "/adapters/{name:model}", unregister, LOAD, FIND),
)
