"""docs/security.md names a test for what it says; each has to be there."""

from __future__ import annotations

import re

import pytest

from tests.e2e.server import REPOSITORY


@pytest.mark.parametrize("page", ["security.md", "security.ko.md"])
def test_every_test_that_it_names_is_there(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    sources = [
        path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py")
    ]
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    assert len(named) > 30
    assert named <= defined, named - defined


def test_both_languages_name_the_same() -> None:
    pages = [REPOSITORY / "docs" / page for page in ("security.md", "security.ko.md")]
    named = [re.findall(r"`(test_\w+|[A-Z_]{6,}\S*)`", page.read_text("utf-8")) for page in pages]
    assert sorted(set(named[0])) == sorted(set(named[1]))
