"""A server's models: what there is, what is loaded, loading and unloading."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from scripts.client.tables import table
from scripts.lib.problem import Failed
from scripts.options import argument, option, pair

LOAD_S = 600.0  # the server gives up before that: LOAD_TIMEOUT_S


@dataclass(kw_only=True)
class Management:
    url: str = option("http://localhost:8081", "its management port; its token: MANAGEMENT_TOKEN")


@dataclass(kw_only=True)
class Models(Management):
    json: bool = option(False, "print all that the server says")


@dataclass(kw_only=True)
class Load(Management):
    name: str = argument("what to call it")
    artifact: str | None = argument("where it is in the store (the same name)", None)
    setting: list[tuple[str, str]] = option(
        [], "of this model alone; repeatable", parser=pair, metavar="NAME=VALUE"
    )


@dataclass(kw_only=True)
class Unload(Management):
    name: str = argument("of the model")


def models(options: Models) -> None:
    """Lists what the store offers and what is loaded."""
    offered = pages(options, available="true")
    loaded = {one["modelName"]: one for one in pages(options)}
    if options.json:
        print(json.dumps({"available": offered, "loaded": [*loaded.values()]}, ensure_ascii=False))
        return
    names = sorted({one["modelName"] for one in offered} | loaded.keys())
    rows = [
        [name, loaded.get(name, {}).get("residency", "loaded" if name in loaded else "")]
        for name in names
    ]
    aliases = call(options, "GET", "/models", limit="1").get("aliases", {})
    rows += [[name, f"alias of {', '.join(of)}"] for name, of in aliases.items()]
    print(table(["model", "loaded"], rows))


def load(options: Load) -> None:
    """Loads a model from the server's store. A call for a model that is in the store does so, too.

    Examples:
    kogpt2 load sowol
    kogpt2 load spring poems/2026/spring --setting backend=native --setting precision=int8
    """
    given = {"model_name": options.name, "url": options.artifact or options.name}
    print(call(options, "POST", "/models", **given, **dict(options.setting))["status"])


def unload(options: Unload) -> None:
    """Unloads a model, once the requests in flight are answered."""
    print(call(options, "DELETE", f"/models/{quote(options.name, safe='/')}")["status"])


def pages(options: Management, **query: str) -> list[dict[str, Any]]:
    """All of a list."""
    answer = call(options, "GET", "/models", **query)
    found: list[dict[str, Any]] = answer["models"]
    while token := answer.get("nextPageToken"):
        answer = call(options, "GET", "/models", **query, next_page_token=token)
        found += answer["models"]
    return found


def call(options: Management, method: str, path: str, **query: str) -> Any:
    """What the server answers. Raises `Failed` with what it says is wrong."""
    import requests

    from scripts.client.targets import message_of, session

    token = os.environ.get("MANAGEMENT_TOKEN") or os.environ.get("INFERENCE_TOKEN")
    url = options.url.rstrip("/")
    try:
        with session(url, token) as calls:
            answer = calls.request(method, url + path, params=query, timeout=LOAD_S)
    except requests.RequestException as error:
        raise Failed(f"{url} cannot be asked ({type(error).__name__}): is it started?") from None
    if not answer.ok:
        raise Failed(f"{message_of(answer.content)} (status {answer.status_code})")
    return answer.json()
