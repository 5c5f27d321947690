"""The OpenAPI document says what there is, no more and no less."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from starlette.routing import Route

from common.form import KINDS
from common.parameters import MAX_LOGPROBS, MAX_SEQUENCES, Parameters
from serving.api import openapi
from serving.api.management import LOAD_PARAMETERS
from serving.api.openai import responses
from serving.api.openai.parsing import CHAT, COMPLETION, DEFAULT_TOKENS, NOT_DONE
from tests.serving.api.gateways import World

# The documents themselves, the console, and what only says that it is not there.
APART = re.compile(
    r"/(api-description|openapi\.json|docs|console/.*|v1/embeddings|v2/.*trace.*|v[12]/\{rest\})?"
)


def routed(managing: bool) -> set[tuple[str, str]]:
    """Method and path of every route. OpenAI's take any method, to refuse it in their words."""
    found, app = set(), World().app
    for route in (app._management if managing else app._inference).routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        path = re.sub(r":\w+}", "}", route.path)
        any_method = path.startswith("/v1/")
        for method in {"*"} if any_method else set(route.methods or ()) - {"HEAD"}:
            found.add((method, path))
    return found


@pytest.mark.parametrize("managing", [False, True])
def test_every_route_of_a_port_is_described_and_nothing_else(managing: bool) -> None:
    described = {
        ("*" if path.startswith("/v1/") else method.upper(), path)
        for path, methods in openapi.document(managing=managing)["paths"].items()
        for method in methods
    }
    assert described == {(m, path) for m, path in routed(managing) if not APART.fullmatch(path)}


def test_every_reference_leads_somewhere() -> None:
    document = openapi.document()
    schemas = document["components"]["schemas"]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named <= set(schemas)
    assert set(schemas) - named == {"ModelSettings"}  # of a file beside a model


@pytest.mark.parametrize(("managing", "names"), [(False, {"call", "unload"}), (True, {"unload"})])
def test_a_load_links_to_routes_of_the_same_document(managing: bool, names: set[str]) -> None:
    paths = openapi.document(managing=managing)["paths"]
    links = paths["/models"]["post"]["responses"]["200"]["links"]
    assert set(links) == names
    for link in links.values():
        _, _, path, method = link["operationRef"].split("/")
        assert method in paths[path.replace("~1", "/")]


def properties(name: str) -> dict[str, Any]:
    schema = openapi.document()["components"]["schemas"][name]
    assert set(schema.get("required", ())) <= set(schema["properties"])
    found: dict[str, Any] = schema["properties"]
    return found


def test_the_fields_are_those_that_are_taken() -> None:
    generate = properties("Parameters")
    known = {field.name for field in dataclasses.fields(Parameters)} - {"form"}
    assert set(generate) == known | set(KINDS)
    assert generate["max_new_tokens"]["default"] == Parameters.max_new_tokens
    assert generate["num_return_sequences"]["maximum"] == MAX_SEQUENCES
    assert generate["logprobs"]["maximum"] == MAX_LOGPROBS
    assert set(properties("Load")) <= LOAD_PARAMETERS
    assert set(properties("OpenAICompletion")) == COMPLETION - set(NOT_DONE)
    assert set(properties("OpenAIChat")) == CHAT - set(NOT_DONE)
    assert set(properties("OpenAIResponse")) == responses.KNOWN - set(responses.NOT_DONE)
    assert properties("OpenAICompletion")["max_tokens"]["default"] == DEFAULT_TOKENS
