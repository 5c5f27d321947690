"""A function that has to be called: the form of the answer, and how it becomes a call."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest
from serving.api.openai import tools
from serving.api.openai.errors import Refused, error_body
from serving.api.openai.tools import Call, ToolChoice

ARGUMENTS = {
    "type": "object",
    "properties": {"도시": {"$ref": "#/$defs/name"}},
    "required": ["도시"],
    "$defs": {"name": {"type": "string"}},
}
WEATHER = {"type": "function", "function": {"name": "날씨", "parameters": ARGUMENTS}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
NAMED = {"type": "function", "function": {"name": "time"}}


def choice(*given: Any, tool_choice: Any = "required") -> ToolChoice:
    found = tools.read({"tools": list(given), "tool_choice": tool_choice})
    assert found is not None
    return found


def test_an_answer_has_the_form_of_one_functions_arguments_or_names_one_of_several() -> None:
    found = choice(WEATHER)
    assert (found.name, found.finish_reason) == ("날씨", "tool_calls")
    assert found.form.parameters == {"json_schema": ARGUMENTS}
    assert found.form.field == "tools[0].function.parameters"

    found = choice(WEATHER, TIME, tool_choice=NAMED)
    assert (found.name, found.finish_reason) == ("time", "stop")  # as OpenAI's
    assert found.form.field == "tools[1].function.parameters"
    assert found.form.value["additionalProperties"] is False

    found = choice(WEATHER, TIME)
    assert (found.name, found.form.field) == ("", "tools")
    first, second = found.form.value["anyOf"]
    assert first["properties"]["name"] == {"const": "날씨"}
    assert first["properties"]["arguments"] == {"$id": "urn:tool:0", **ARGUMENTS}
    assert second["properties"]["name"] == {"const": "time"}


def test_without_a_function_to_call_there_is_a_text() -> None:
    none: dict[str, Any] = {"tool_choice": "none"}
    for given in ({}, {"tools": []}, none, none | {"tools": [WEATHER]}):
        assert tools.read(given) is None
    assert tools.read({"tool_choice": "auto", "tools": []}) is None


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"tools": [WEATHER]}, "tools", "cannot decide whether to call"),
        ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice", "cannot decide whether"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom"}}, "tool_choice", "must be"),
        ({"tool_choice": "required"}, "tool_choice", "send response_format"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "없음"}}},
            "tool_choice.function.name",
            "날씨",
        ),
        ({"tools": [WEATHER], "tool_choice": NAMED | {"function": "time"}}, None, "must be one of"),
        ({"tools": WEATHER}, "tools", "must be a list"),
        ({"tools": [WEATHER] * 129}, "tools", "at most 128"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "must be"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name", "must be text"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, None, "1 to 64 characters"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "must be a JSON schema, is a list",
        ),
    ],
)
def test_a_call_that_cannot_be_had_is_refused(given: Any, param: Any, message: str) -> None:
    with pytest.raises((Refused, InvalidRequest)) as caught:
        tools.read(given)
    said = error_body(caught.value)["error"]
    assert param in (None, said["param"])
    assert message in said["message"]


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("given", "text", "name", "arguments"),
    [
        ([WEATHER], '{"도시": "서울"}', "날씨", '{"도시": "서울"}'),
        (
            [WEATHER, TIME],
            '{"name": "날씨", "arguments": {"도시": "서}울"}}',
            "날씨",
            '{"도시": "서}울"}',
        ),
        ([WEATHER, TIME], '{"name":"time","arguments":{}}', "time", "{}"),
    ],
)
def test_a_stream_has_the_function_and_then_its_arguments(
    given: Any, text: str, name: str, arguments: str, size: int
) -> None:
    call = Call(choice(*given))
    ends = range(size, len(text) + size, size)
    parts = (call.write(text[end - size : end], end >= len(text)) for end in ends)
    first, *rest = [delta for part in parts for delta in part]
    assert first["function"] == {"name": name, "arguments": ""}
    assert first["id"].startswith("call_")
    assert all(set(delta) == {"index", "function"} for delta in rest)
    assert "".join(delta["function"]["arguments"] for delta in rest) == arguments
    (whole,) = tools.message(choice(*given), text)["tool_calls"]
    assert whole["function"] == {"name": name, "arguments": arguments}


def test_a_call_that_is_cut_off_has_what_there_is_of_it() -> None:
    several = choice(WEATHER, TIME)
    whole = '{"name": "날씨", "arguments": {"도시": "서울"}'
    (cut,) = tools.message(several, whole)["tool_calls"]
    assert cut["function"]["arguments"] == '{"도시": "서울"}'
    found = tools.message(several, '{"name": "날')
    assert (found["content"], "tool_calls" in found) == (None, False)
