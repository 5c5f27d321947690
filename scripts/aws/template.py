"""Reads deploy/sagemaker/endpoint.yaml: its parameters and rules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from command.errors import Problem

FILE = Path(__file__).resolve().parents[2] / "deploy" / "sagemaker" / "endpoint.yaml"
EMPTY = "Environment: {}"
Values = Mapping[str, str]  # of all parameters


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads `!Not [...]` as `{"Fn::Not": [...]}`."""


def _function(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> dict[str, Any]:
    key = name if name in ("Ref", "Condition") else f"Fn::{name}"
    items = isinstance(node, yaml.SequenceNode)
    return {key: loader.construct_sequence(node, deep=True) if items else node.value}


_Loader.add_multi_constructor("!", _function)


@cache
def template() -> dict[str, Any]:
    result: dict[str, Any] = yaml.load(FILE.read_text("utf-8"), _Loader)  # noqa: S506
    return result


def body(environment: Mapping[str, str]) -> str:
    """Return the template's text with a container's environment, which is no parameter."""
    text = FILE.read_text("utf-8")
    assert text.count(EMPTY) == 1
    return text.replace(EMPTY, f"Environment: {json.dumps(dict(environment))}")


def option_name(parameter: str) -> str:
    """Return max_instances for MaxInstances."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", parameter).lower()


def with_defaults(given: Values) -> Values:
    slots = template()["Parameters"].items()
    return {name: given.get(name, str(slot.get("Default", ""))) for name, slot in slots}


def refuse(values: Values) -> None:
    """Raise `Problem` for the first of the template's assertions that fails."""
    for rule in template()["Rules"].values():
        if holds(rule.get("RuleCondition", True), values):
            for assertion in rule["Assertions"]:
                if not holds(assertion["Assert"], values):
                    raise Problem(assertion["AssertDescription"])


def holds(term: Any, values: Values) -> Any:
    """Evaluate a rule's function; CloudFormation compares parameters as strings."""
    if not isinstance(term, dict):
        return term if isinstance(term, bool) else str(term)
    ((name, arguments),) = term.items()
    if name == "Ref":
        return values[arguments]
    result = [holds(argument, values) for argument in arguments]
    if name == "Fn::Equals":
        return result[0] == result[1]
    return {
        "Fn::Not": lambda: not result[0],
        "Fn::And": lambda: all(result),
        "Fn::Or": lambda: any(result),
    }[name]()
