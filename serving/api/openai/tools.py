"""Function calls, for requests whose `tool_choice` requires one.

The models cannot decide to call a function. If the request requires a call, the answer is
constrained to the schema of the function's arguments; of several functions, the model chooses one
by generating its name.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common import fields
from serving.api.answer_form import GivenForm, form_of
from serving.api.openai.errors import Refused

MAX_TOOLS = 128
MAX_NAME = 64  # characters
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
UNDECIDED = (
    'these models cannot decide whether to call a function: tool_choice must be "none", "required"'
    ' or {"type": "function", "function": {"name": ...}}'
)
# The text before the arguments in a call of one of several functions; a brace follows them.
HEAD = re.compile(r'\{"name": ?("(?:[^"\\]|\\.)*"), ?"arguments": ?(?=\S)')


@dataclass(frozen=True)
class ToolChoice:
    """The function, or one of several, that an answer must call.

    form: the form of the arguments, or of {"name", "arguments"} for several functions
    name: "" for several functions
    finish_reason: the reason of a complete answer, as in OpenAI's API
    """

    form: GivenForm
    name: str
    finish_reason: str


def read(given: Mapping[str, Any]) -> ToolChoice | None:
    """Return the function that an answer must call, or None.

    Raises `Refused`, `InvalidRequest`.
    """
    functions = _functions(given.get("tools", []))
    choice = given.get("tool_choice", "auto")
    if choice == "none" or (choice == "auto" and not functions):
        return None
    if not functions:
        raise Refused("tool_choice", "needs tools; for JSON without one send response_format")
    if choice == "required":
        called, reason = list(functions), "tool_calls"
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in functions:
            known = ", ".join(functions)
            raise Refused("tool_choice.function.name", f"must be one of the tools': {known}")
        called, reason = [name], "stop"
    else:
        field = "tool_choice" if "tool_choice" in given else "tools"
        raise Refused(field, f"is not supported: {UNDECIDED}")
    if len(called) == 1:
        return ToolChoice(functions[called[0]], called[0], reason)
    calls = [_call(name, functions[name], i) for i, name in enumerate(called)]
    return ToolChoice(form_of("tools", "json_schema", {"anyOf": calls}), "", reason)


def _functions(tools: Any) -> dict[str, GivenForm]:
    """Return the forms of functions' arguments, by the functions' names. Raises `Refused`."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise Refused("tools", f"must be a list of at most {MAX_TOOLS} functions")
    result = {}
    for i, tool in enumerate(tools):
        field = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise Refused(field, 'must be {"type": "function", "function": ...}')
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
            raise Refused(f"{field}.function.name", f"must be text of 1 to {MAX_NAME} characters")
        assert isinstance(function, Mapping)
        schema, path = function.get("parameters"), f"{field}.function.parameters"
        if not isinstance(schema, Mapping | None):
            raise Refused(path, f"must be a JSON schema, is {fields.kind(schema)}")
        schema = NO_ARGUMENTS if schema is None else {"type": "object", **schema}
        result[name] = form_of(path, "json_schema", schema)
    return result


def _call(name: str, arguments: GivenForm, index: int) -> dict[str, Any]:
    """Return the schema of a call; `$id` limits references in the arguments to their schema."""
    schema = {"$id": f"urn:tool:{index}", **arguments.value}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": schema},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class Call:
    """Converts an answer to the call of a function while it is generated."""

    def __init__(self, choice: ToolChoice) -> None:
        self._name, self._several = choice.name, not choice.name
        self._id = f"call_{secrets.token_hex(12)}"
        self._text, self._begun = "", False
        self._at = 0  # where in the text the arguments begin that were not yet returned

    def write(self, text: str, last: bool) -> list[dict[str, Any]]:
        """Return a stream's `tool_calls` for the answer's next piece of text.

        The first of all has the function's name, the others have pieces of its arguments.
        """
        self._text += text
        if not self._name:
            head = HEAD.match(self._text)
            if head is None:
                return []
            self._name, self._at = json.loads(head[1]), head.end()
        result: list[dict[str, Any]] = []
        if not self._begun:
            function = {"name": self._name, "arguments": ""}
            result.append({"index": 0, "id": self._id, "type": "function", "function": function})
            self._begun = True
        end = len(self._text)
        if self._several and (not last or _is_json(self._text)):
            end -= 1  # the last character may be the brace after the arguments
        if end > self._at:
            result.append({"index": 0, "function": {"arguments": self._text[self._at : end]}})
            self._at = end
        return result


def message(choice: ToolChoice, text: str) -> dict[str, Any]:
    """Return the message of a whole answer, without a call if it ended before the name."""
    result: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    if deltas := Call(choice).write(text, True):
        arguments = "".join(delta["function"]["arguments"] for delta in deltas)
        function = {**deltas[0]["function"], "arguments": arguments}
        result["tool_calls"] = [{"id": deltas[0]["id"], "type": "function", "function": function}]
    return result


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
