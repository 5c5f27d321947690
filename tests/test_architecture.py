"""docs/develop/architecture.md, in both languages, and glossary.md name what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "develop" / name for name in ("architecture.md", "architecture.ko.md")]
GLOSSARY = PAGES[0].with_name("glossary.md")
PACKAGES = ("common", "engine", "handlers", "serving")
FILE = re.compile(r"`([\w/]+\.py)`")


def defined(file: Path) -> set[str]:
    """`function`, `Class`, `Class.method` and `CONSTANT`."""
    names = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(f"{node.name}.{inner.name}")
    return names


@pytest.mark.parametrize("page", [*PAGES, GLOSSARY], ids=lambda page: page.name)
def test_the_files_and_functions_of_the_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = re.findall(FILE.pattern + r"[^`\n]* `([\w.]+)`", text)
    assert len(named) > 20
    wrong = [f"{file} {name}" for file, name in named if name not in defined(ROOT / file)]
    assert not wrong
    known = set().union(*(defined(ROOT / file) for file in FILE.findall(text)))
    methods = set(re.findall(r"`([A-Z]\w+\.\w+)`", text))
    assert methods <= known, methods - known


def folders(page: Path) -> set[str]:
    """The paths of the page's tree of folders, one level of which is indented."""
    found, outer = set(), ""
    for indent, name in re.findall(r"^( *)(\w+)/ {2,}\S", page.read_text("utf-8"), re.MULTILINE):
        outer = outer if indent else name
        found.add(f"{outer}/{name}" if indent else name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_folder_is_on_the_page(page: Path) -> None:
    named = folders(page)
    assert [folder for folder in named if not (ROOT / folder).is_dir()] == []
    for package in PACKAGES:
        inside = {p.parent for p in (ROOT / package).glob("*/*.py")} - {ROOT / package}
        found = {str(folder.relative_to(ROOT)) for folder in inside}
        assert found <= named | {"handlers/mms_home"}, package
