"""The OpenAPI document says what there is, no more and no less."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from common.form import KINDS
from common.parameters import MAX_LOGPROBS, MAX_SEQUENCES, Parameters
from serving.api import answer_form, routes
from serving.api.openai.parsing import DEFAULT_TOKENS, OURS


def routed(managing: bool) -> set[tuple[str, str]]:
    """Method and path of every route of a contract, but what only refuses."""
    return {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in (routes.MANAGEMENT if managing else routes.REQUESTS)
        for method in route.methods.split()
        if route.kind.tag
    }


@pytest.mark.parametrize("managing", [False, True])
def test_every_route_of_a_port_is_described_and_nothing_else(managing: bool) -> None:
    described = {
        (method.upper(), path)
        for path, methods in routes.document(managing=managing)["paths"].items()
        for method in methods
    }
    assert described == routed(managing)
    undescribed = {route.path for route in routes.REQUESTS if not route.kind.tag}
    assert undescribed == {
        *("/", "/api-description", "/openapi.json", "/docs", "/v1/{rest:path}"),
        *("/v2/trace/setting", "/v2/models/{name:model}/trace/setting"),
    }


def test_every_operation_has_a_summary_and_every_reference_leads_somewhere() -> None:
    document = routes.document()
    paths, schemas = document["paths"], document["components"]["schemas"]
    assert all(operation["summary"] for methods in paths.values() for operation in methods.values())
    for path in ("/predictions/{name}", "/v1/chat/completions", "/v2/models/{name}/infer"):
        names = {parameter["name"] for parameter in paths[path]["post"]["parameters"]}
        assert "x-session-id" in names
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named <= set(schemas)
    assert set(schemas) - named == {"ModelSettings"}  # of a file beside a model


@pytest.mark.parametrize(("managing", "names"), [(False, {"call", "unload"}), (True, {"unload"})])
def test_a_load_links_to_routes_of_the_same_document(managing: bool, names: set[str]) -> None:
    paths = routes.document(managing=managing)["paths"]
    links = paths["/models"]["post"]["responses"]["200"]["links"]
    assert set(links) == names
    for link in links.values():
        _, _, path, method = link["operationRef"].split("/")
        assert method in paths[path.replace("~1", "/")]


def properties(name: str) -> dict[str, Any]:
    schema = routes.document()["components"]["schemas"][name]
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
    own = {*OURS, *answer_form.FIELDS, answer_form.PATTERN} - {"response_format"}
    for name in ("OpenAICompletion", "OpenAIChat", "OpenAIResponse"):
        assert own <= set(properties(name))
    assert properties("OpenAICompletion")["max_tokens"]["default"] == DEFAULT_TOKENS
