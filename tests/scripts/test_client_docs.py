"""The commands in docs/load-testing.md and in the scripts' examples can be typed as they are."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shlex
from types import ModuleType

import pytest

from tests.e2e.server import REPOSITORY

SCRIPTS = ("invoke", "load_test", "latency_table")
PAGES = ("docs/load-testing.md", "docs/load-testing.ko.md")


def script(name: str) -> ModuleType:
    path = str(REPOSITORY / "scripts" / name)
    loader = importlib.machinery.SourceFileLoader(f"script_{name}", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def commands(text: str, name: str) -> list[list[str]]:
    """Arguments of each line that runs the script; a comment stands apart by spaces."""
    found = re.findall(rf"^(?:.*\| +| *)scripts/{name} (--.*?)(?: {{4}}.*)?$", text, re.MULTILINE)
    return [shlex.split(line) for line in found]


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_can_be_typed(name: str) -> None:
    module = script(name)
    sources = [(REPOSITORY / page).read_text(encoding="utf-8") for page in PAGES]
    for text in (*sources, module.EXAMPLE):
        lines = commands(text, name)
        assert lines
        for line in lines:
            module.parse(line)


def test_both_pages_show_the_same_commands_and_options() -> None:
    texts = [(REPOSITORY / page).read_text(encoding="utf-8") for page in PAGES]
    for name in SCRIPTS:
        first, second = (commands(text, name) for text in texts)
        assert first == second
    first_rows, second_rows = (re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE) for text in texts)
    assert len(first_rows) > 8
    assert first_rows == second_rows
