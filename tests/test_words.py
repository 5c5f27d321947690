"""Names, docstrings and comments use the terms of docs/develop/glossary.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A folder joins once it is clean.
FOLDERS = (
    "benchmarks",
    "command",
    "common",
    "compat",
    "docker",
    "engine",
    "handlers",
    "scripts",
    "serving",
    "testbed",
)
FILES = [
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
]
SUFFIXES = (".c", ".cc", ".cfg", ".css", ".h", ".html", ".js", ".proto", ".sh", ".yaml", ".yml")
OTHERS = [
    str(path.relative_to(ROOT))
    for folder in (*FOLDERS, "deploy")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in SUFFIXES
]
# Words of daily life in a name, where the field has a term or the thing a name.
NAMES = re.compile(
    r"asked|told|said|found|kept|look(s|ed)?|glance|whoever|unuse|spare|given_up|let_go|room"
)
ALLOWED = {"ModelNotFound", "ResourceNotFound"}  # types of errors, which clients know
# Requests, models and processes are no persons.
PROSE = re.compile(r"\b(whoever|nobody|somebody|anybody|everybody|whom|told|asked|said)\b", re.I)
# The first word of a function's docstring is a verb in the imperative, or begins a noun phrase.
DESCRIBING = re.compile(
    r"(Adds|Answers|Builds|Calls|Changes|Checks|Chooses|Closes|Computes|Continues|Converts|Copies|Counts|"
    r"Creates|Deletes|Ends|Fetches|Gives|Has|Holds|Kills|Lists|Loads|Makes|Measures|Opens|Parses|Prints|Pushes|Puts|"
    r"Raises|Reads|Registers|Removes|Returns|Runs|Sends|Serves|Sets|Shows|Starts|Stops|Takes|Unloads|"
    r"Waits|Writes|Yields)\b"
)


def names(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines, also local ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def words(name: str) -> str:
    """`CamelCase` and `snake_case` as ` camel_case `."""
    return f"_{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', name).lower()}_"


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from filter(None, [ast.get_docstring(node)])


def describing(tree: ast.AST) -> Iterator[str]:
    """The first words of functions' docstrings that describe instead of command."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            word := DESCRIBING.match(ast.get_docstring(node) or "")
        ):
            yield word[0]


def persons(text: str) -> list[str]:
    """The words of a text that break the rule for persons, with what would pass."""
    return [
        f"persons: {word!r} in a comment or docstring; name the request, model, process or client"
        for word in PROSE.findall(text)
    ]


def faults(source: str) -> list[str]:
    """What breaks a rule: the rule, the name or text, and what would pass."""
    tree = ast.parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    texts = list(docstrings(tree))
    return [
        *(
            f"names: {name} has {word[1]!r}; use the field's term, or what the thing is"
            for name in sorted(set(names(tree)) - ALLOWED)
            if (word := re.search(rf"_({NAMES.pattern})_", words(name)))
        ),
        *(fault for text in (*texts, *comments) for fault in persons(text)),
        *(
            f"summaries: {line!r}; the first line of a docstring is a sentence and ends with . or :"
            for text in texts
            if not (line := text.splitlines()[0]).endswith((".", ":"))
        ),
        *(
            f"mood: a function's docstring begins with {word!r}; use the imperative, as in 'Return'"
            for word in describing(tree)
        ),
    ]


@pytest.mark.parametrize("file", FILES)
def test_names_and_docstrings_use_the_terms_of_the_field(file: str) -> None:
    found = faults((ROOT / file).read_text("utf-8"))
    assert found == []


@pytest.mark.parametrize("file", OTHERS)
def test_other_files_have_no_persons_either(file: str) -> None:
    assert persons((ROOT / file).read_text("utf-8")) == []


def test_a_fault_names_its_rule_and_what_would_pass() -> None:
    source = '''"""A summary that goes on
in a second line."""
def ask(told, plain):
    """What somebody sends."""
    self.given_up = plain  # nobody waits
class RoomAsked:
    """Returns are counted."""
class ModelNotFound:
    def plain():
        """Returns it."""
'''
    named = "; use the field's term, or what the thing is"
    person = "in a comment or docstring; name the request, model, process or client"
    assert faults(source) == [
        f"names: RoomAsked has 'room'{named}",
        f"names: given_up has 'given_up'{named}",
        f"names: told has 'told'{named}",
        f"persons: 'somebody' {person}",
        f"persons: 'nobody' {person}",
        "summaries: 'A summary that goes on'; the first line of a docstring is a sentence and ends"
        " with . or :",
        "mood: a function's docstring begins with 'Returns'; use the imperative, as in 'Return'",
    ]
