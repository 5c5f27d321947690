"""`kogpt2 models`: lists a server's models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from command.options import option
from command.tables import table
from scripts.client.management import Management, call


@dataclass(kw_only=True)
class Models(Management):
    json: bool = option(False, "print the server's whole answer")


def run(options: Models) -> None:
    """List the models in the store and which of them are loaded.

    Examples:
    kogpt2 models
    kogpt2 models --json --url http://localhost:9001
    """
    store = call(options, "GET", "/models", {"available": "true"})
    loaded = {model["modelName"]: model for model in loaded_models(options)}
    if options.json:
        answer = {"available": store["models"], "loaded": [*loaded.values()]}
        print(json.dumps(answer, ensure_ascii=False))
        return
    names = sorted({model["modelName"] for model in store["models"]} | loaded.keys())
    rows = [
        [name, loaded.get(name, {}).get("residency", "loaded" if name in loaded else "")]
        for name in names
    ]
    aliases = store.get("aliases", {}).items()
    rows += [[name, f"alias of {', '.join(of)}"] for name, of in aliases]
    print(table(["model", "loaded"], rows))


def loaded_models(options: Management) -> list[dict[str, Any]]:
    """Return the models of all pages of a server's list."""
    answer = call(options, "GET", "/models")
    models: list[dict[str, Any]] = answer["models"]
    while token := answer.get("nextPageToken"):
        answer = call(options, "GET", "/models", {"next_page_token": token})
        models += answer["models"]
    return models
