"""Imports between the packages go down only, through the doors that
docs/develop/architecture.md names, and in no circle. The server imports no tool, `scripts` and
`benchmarks` nothing of each other, and `testbed` nothing of either or of `tests`."""

from __future__ import annotations

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("common", "engine", "handlers", "serving")  # the ground floor first
# What a tool may import beside the floors and itself.
TOOLS = {
    "command": set[str](),
    "scripts": {"command"},
    "testbed": {"command"},
    "benchmarks": {"command", "testbed"},
    "tests": {"command", "scripts", "testbed", "benchmarks"},
}
DOORS = {
    "handlers": {"engine.http.client", "engine.artifacts.read_params"},
    "serving": {
        "engine.http.client",
        "engine.http.async_client",
        "handlers.dispatch",
        "handlers.payload",
        "handlers.text.v2",
        "handlers.user_code.entry_point",
        "handlers.v2",
    },
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(p for floor in (*FLOORS, *TOOLS) for p in (ROOT / floor).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return a file's imports of our packages, those inside functions and for types included."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
        else:
            continue
        for whole, package in names:
            found = whole if whole in MODULES else package
            if found in MODULES:
                imported.add(found)
    return frozenset(imported)


def floor(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("above", FLOORS)
def test_a_floor_imports_what_is_below_it_through_its_doors(above: str) -> None:
    wrong = []
    for module in MODULES:
        for name in imports(module) if floor(module) == above else ():
            if floor(name) not in (above, "common") and name not in DOORS.get(above, ()):
                wrong.append(f"{module} imports {name}")
    assert not wrong


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_imports_the_floors_and_what_tools_share(tool: str) -> None:
    allowed = {tool, *FLOORS, *TOOLS[tool]}
    mine = [module for module in MODULES if floor(module) == tool]
    wrong = {(module, name) for module in mine for name in imports(module)}
    assert {pair for pair in wrong if floor(pair[1]) not in allowed} == set()


def test_every_door_is_used() -> None:
    for above, doors in DOORS.items():
        used = {name for m in MODULES if floor(m) == above for name in imports(m)}
        assert doors <= used


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: imports(module) - {module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
