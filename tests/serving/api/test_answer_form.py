"""Each API's names for the form of an answer become one parameter of the engine's."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import DeadlineExceeded, InvalidRequest
from serving.api.answer_form import GivenForm, named_by_request, read

SCHEMA = {"type": "object", "properties": {"감정": {"enum": ["긍정", "부정"]}}}
OBJECT = {"type": "object"}
TEXT = '{"type":"integer"}'
GBNF = 'root ::= "긍정" | "부정"'


def openai(type: str, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": type, **more}}


def vllm(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        ({}, None),
        (openai("text"), None),
        (openai("json_object"), {"json_schema": OBJECT}),
        # OpenAI
        (
            openai("json_schema", json_schema={"name": "답", "schema": SCHEMA, "strict": True}),
            {"json_schema": SCHEMA},
        ),
        # llama.cpp
        (openai("json_object", schema=SCHEMA), {"json_schema": SCHEMA}),
        (openai("json_schema", schema=SCHEMA), {"json_schema": SCHEMA}),
        (openai("json_object", value=SCHEMA), {"json_schema": SCHEMA}),
        ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"grammar": GBNF}, {"grammar": GBNF}),
        # TGI
        (openai("json", value=SCHEMA), {"json_schema": SCHEMA}),
        (openai("json", value=TEXT), {"json_schema": TEXT}),
        (openai("regex", value="가"), {"regex": "가"}),
        (openai("json_schema", value={"name": "답", "schema": SCHEMA}), {"json_schema": SCHEMA}),
        # vLLM
        (vllm(json=SCHEMA), {"json_schema": SCHEMA}),
        (vllm(json=TEXT, backend="xgrammar"), {"json_schema": TEXT}),
        (vllm(json_object=True, regex=None), {"json_schema": OBJECT}),
        (vllm(json=SCHEMA, disable_additional_properties=True), {"json_schema": SCHEMA}),
        (vllm(regex=r"\d+"), {"regex": r"\d+"}),
        (vllm(choice=["가", "나"]), {"choice": ["가", "나"]}),
        (vllm(grammar=GBNF, json_object=False), {"grammar": GBNF}),
        ({"guided_json": TEXT}, {"json_schema": TEXT}),
        ({"guided_regex": "가|나"}, {"regex": "가|나"}),
        ({"guided_choice": ["가", "나"]}, {"choice": ["가", "나"]}),
        ({"guided_grammar": GBNF}, {"grammar": GBNF}),
        # ours
        ({"choice": ["가"]}, {"choice": ["가"]}),
        ({"choice": []}, {"choice": []}),
        ({"regex": "가"}, {"regex": "가"}),
    ],
)
def test_a_form_is_found_by_the_names_of_several_servers(given: Any, parameters: Any) -> None:
    form = read(given)
    assert (form and form.parameters) == parameters


@pytest.mark.parametrize(
    ("given", "spaces"),
    [
        (
            {"guided_json": TEXT, "guided_whitespace_pattern": " ?"},
            {"whitespace_flexible": True, "whitespace_pattern": " ?"},
        ),
        (
            vllm(json=True, whitespace_pattern=r"\s"),
            {"whitespace_flexible": True, "whitespace_pattern": r"\s"},
        ),
        (
            vllm(json=SCHEMA, disable_any_whitespace=True),
            {"item_separator": ",", "key_separator": ":"},
        ),
    ],
)
def test_spaces_that_a_request_wants_become_the_schemas_own(given: Any, spaces: Any) -> None:
    form = read(given)
    assert form is not None
    assert form.value["x-guidance"] == spaces


def test_spaces_change_nothing_of_another_form() -> None:
    form = read({"guided_choice": ["가"], "guided_whitespace_pattern": " "})
    assert form == GivenForm("guided_choice", "choice", ["가"])
    assert read({"guided_whitespace_pattern": " "}) is None
    form = read(vllm(regex="가", disable_any_whitespace=True))
    assert form == GivenForm("structured_outputs.regex", "regex", "가")


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object, is a string"),
        ({"response_format": {}}, "response_format.type", "must be text, json_object"),
        (openai("xml"), "response_format.type", "must be text"),
        (openai("json_schema"), "response_format.schema", "must be a JSON schema, is null"),
        (
            openai("json_schema", json_schema={"name": "답"}),
            "response_format.json_schema.schema",
            "must be a JSON schema, is null",
        ),
        (openai("json_schema", json_schema=[]), "response_format.json_schema", "is a list"),
        (vllm(), "structured_outputs", "must have one of json, json_object"),
        (vllm(xml=1), "structured_outputs.xml", "known are json,"),
        (vllm(choice="가"), "structured_outputs.choice", "a list of texts"),
        (vllm(json_object=1), "structured_outputs.json_object", "true or"),
        (vllm(json={}, regex="가"), "structured_outputs.regex", "and structured_outputs.json are"),
        (vllm(json={}, whitespace_pattern=1), "structured_outputs.whitespace_pattern", "be text"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_regex": ""}, "guided_regex", "must be text that is not empty"),
        ({"guided_whitespace_pattern": 3}, "guided_whitespace_pattern", "must be text"),
        ({"guided_choice": ["가"], "regex": "나"}, "regex", "and guided_choice are given"),
        ({**openai("json_object"), "grammar": GBNF}, "grammar", "and response_format are given"),
    ],
)
def test_what_is_no_form_is_refused_by_its_field(given: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(given)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field} ")
    assert message in caught.value.message


def test_the_engines_error_about_a_form_names_the_requests_field() -> None:
    form = GivenForm("response_format", "json_schema", OBJECT)
    error = named_by_request(InvalidRequest("parameters.json_schema: too: large"), form)
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.field) == ("response_format: too: large", "response_format")
    for other in (InvalidRequest("parameters.choice: of the model"), DeadlineExceeded("late")):
        assert named_by_request(other, form) is other
        assert named_by_request(other, None) is other
