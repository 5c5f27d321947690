"""Names of models in the store for schemathesis, as SCHEMATHESIS_HOOKS=tests.fuzz.hooks."""

from __future__ import annotations

from typing import Any

import schemathesis

KNOWN = ("a", "시", "texts", "script")


def known(name: Any) -> str:
    return KNOWN[sum(map(ord, str(name))) % len(KNOWN)]


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    if path_parameters and len(str(path_parameters.get("name", ""))) % 4:
        path_parameters["name"] = known(path_parameters["name"])
    return path_parameters


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """A load under a name of its own, which the links then call and unload."""
    if isinstance(body, dict) and isinstance(body.get("url"), str):
        body |= {"url": known(body["url"]), "model_name": f"x{len(body['url'])}"}
    elif isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = known(body["model"])
    return body
