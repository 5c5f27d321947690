"""`kogpt2 models`, `load` and `unload`: calls to a server's management port."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from command.errors import Failed
from command.options import argument, option, pair
from command.tables import table

TIMEOUT_S = 600.0  # above the server's LOAD_TIMEOUT_S, after which it answers 504


@dataclass(kw_only=True)
class Management:
    url: str = option(
        "http://localhost:8081", "the server's management port; its token: MANAGEMENT_TOKEN"
    )


@dataclass(kw_only=True)
class Models(Management):
    json: bool = option(False, "print the server's whole answer")


@dataclass(kw_only=True)
class Load(Management):
    name: str = argument("the name in requests")
    artifact: str | None = argument("the model's name in the store (default: NAME)", None)
    setting: list[tuple[str, str]] = option(
        [], "a setting of this model; repeatable", parser=pair, metavar="NAME=VALUE"
    )


@dataclass(kw_only=True)
class Unload(Management):
    name: str = argument("the model")


def show(options: Models) -> None:
    """Lists the models in the store and which of them are loaded.

    Examples:
    kogpt2 models
    kogpt2 models --json --url http://localhost:9001
    """
    available = pages(options, available="true")
    loaded = {model["modelName"]: model for model in pages(options)}
    if options.json:
        answer = {"available": available, "loaded": [*loaded.values()]}
        print(json.dumps(answer, ensure_ascii=False))
        return
    names = sorted({model["modelName"] for model in available} | loaded.keys())
    rows = [
        [name, loaded.get(name, {}).get("residency", "loaded" if name in loaded else "")]
        for name in names
    ]
    aliases = call(options, "GET", "/models", limit="1").get("aliases", {})
    rows += [[name, f"alias of {', '.join(of)}"] for name, of in aliases.items()]
    print(table(["model", "loaded"], rows))


def load(options: Load) -> None:
    """Loads a model from the server's store. A request for a model in the store loads it, too.

    Examples:
    kogpt2 load sowol
    kogpt2 load spring poems/2026/spring --setting backend=native --setting precision=int8
    """
    query = {"model_name": options.name, "url": options.artifact or options.name}
    print(call(options, "POST", "/models", **query, **dict(options.setting))["status"])


def unload(options: Unload) -> None:
    """Unloads a model after its requests in flight have been answered.

    Examples:
    kogpt2 unload sowol
    """
    print(call(options, "DELETE", f"/models/{quote(options.name, safe='/')}")["status"])


def pages(options: Management, **query: str) -> list[dict[str, Any]]:
    """All pages of a list of models."""
    answer = call(options, "GET", "/models", **query)
    models: list[dict[str, Any]] = answer["models"]
    while token := answer.get("nextPageToken"):
        answer = call(options, "GET", "/models", **query, next_page_token=token)
        models += answer["models"]
    return models


def call(options: Management, method: str, path: str, **query: str) -> Any:
    """Returns the answer's JSON. Raises `Failed` with the server's error message."""
    import requests

    from scripts.client.targets import message_of, session

    token = os.environ.get("MANAGEMENT_TOKEN") or os.environ.get("INFERENCE_TOKEN")
    url = options.url.rstrip("/")
    try:
        with session(url, token) as calls:
            answer = calls.request(method, url + path, params=query, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise Failed(f"{url} does not answer ({type(error).__name__}): is it started?") from None
    if not answer.ok:
        raise Failed(f"{message_of(answer.content)} (status {answer.status_code})")
    return answer.json()
