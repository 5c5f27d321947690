"""The files of the console's page; tests/e2e/test_console.py opens it in a browser."""

from __future__ import annotations

import re
from pathlib import Path

from serving.console.routes import INDEX, PAGE, TYPES

MOST_BYTES = 62_000


def test_the_page_is_small_and_whole_and_asks_no_other_host() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
    assert sum(len(text.encode()) for text in files.values()) <= MOST_BYTES
    assert {Path(name).suffix for name in files} <= set(TYPES)
    linked = set(re.findall(r'"/console/([^"]+)"', files[INDEX]))
    imported = {name for text in files.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert linked == set(files) - {INDEX}
    assert imported == {name for name in files if name.endswith(".js")} - {"app.js"}
    for name, text in files.items():
        hosts = set(re.findall(r"https?://[^\s\"'`]+", text))
        assert hosts <= {"http://www.w3.org/2000/svg"}, name  # a namespace, which nobody fetches
        assert not re.search(r"\bstyle=|\bon\w+=|innerHTML|\beval\b", text), name


def test_a_text_has_the_same_values_in_both_languages_and_all_texts_exist() -> None:
    table = (PAGE / "texts.js").read_text(encoding="utf-8")
    texts = re.findall(r'^  (\w+): \[\s*"(.*)",\s*"(.*)",?\s*\],$', table, re.MULTILINE)
    for key, *languages in texts:
        english, korean = (set(re.findall(r"\{\w+\}", text)) for text in languages)
        assert english == korean, key
    used = "".join(p.read_text(encoding="utf-8") for p in PAGE.iterdir() if p.name != "texts.js")
    named = set(re.findall(r'\bt\("(\w+)"', used)) | set(re.findall(r'data-text="(\w+)"', used))
    assert len(named) > 50
    assert named <= {key for key, *_ in texts}
