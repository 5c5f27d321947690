"""The pages in both languages say the same, by what can be compared without understanding them."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KOREAN = sorted(
    page.relative_to(ROOT) for page in [*ROOT.glob("*.ko.md"), *(ROOT / "docs").rglob("*.ko.md")]
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?<=\s)(#|//) .*$", re.MULTILINE)
NAMES = re.compile(
    r"--[a-z][a-z-]+|\b[A-Z]+_[A-Z0-9_]+\b|\btest_\w+|[\w./-]+\.(?:py|json|yaml|txt|gz)\b",
    re.ASCII,  # a Korean particle ends a name
)


def english(page: Path) -> str:
    return (ROOT / str(page).replace(".ko.md", ".md")).read_text("utf-8")


def headings(text: str) -> list[int]:
    """Their levels."""
    return [len(line.split()[0]) for line in FENCE.sub("", text).splitlines() if line[:1] == "#"]


def tables(text: str) -> list[list[int]]:
    """How many cells each row has."""
    rows = [line.replace("\\|", "").count("|") for line in FENCE.sub("", text).splitlines()]
    return [list(group) for is_table, group in groupby(rows, bool) if is_table]


def blocks(text: str) -> list[str]:
    """What is in fences, without the comments, which are in the page's language; of those that say
    no language of their own, drawings and listings, only that they are there."""
    return [COMMENT.sub("", b) if b[3] != "\n" else "" for b in FENCE.findall(text)]


@pytest.mark.parametrize("page", KOREAN, ids=str)
def test_a_page_has_the_same_parts_in_both_languages(page: Path) -> None:
    korean, other = (ROOT / page).read_text("utf-8"), english(page)
    assert headings(korean) == headings(other)
    assert tables(korean) == tables(other)
    assert blocks(korean) == blocks(other)


@pytest.mark.parametrize("page", KOREAN, ids=str)
def test_a_page_names_the_same_things_in_both_languages(page: Path) -> None:
    """Options, settings, tests and files."""
    named = [set(NAMES.findall(text)) for text in ((ROOT / page).read_text("utf-8"), english(page))]
    assert named[0] ^ named[1] == set()
