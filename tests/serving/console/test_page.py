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


def test_every_text_is_there_in_both_languages() -> None:
    text = (PAGE / "texts.js").read_text(encoding="utf-8")
    tables = re.findall(r"const (ENGLISH|KOREAN) = \{(.*?)\n\};", text, re.DOTALL)
    english, korean = (
        {key: set(re.findall(r"\{(\w+)\}", said)) for key, said in found}
        for found in (re.findall(r'^  (\w+): "(.*)",$', table, re.MULTILINE) for _, table in tables)
    )
    assert english == korean  # the same keys, with the same values in them
    used = "".join(p.read_text(encoding="utf-8") for p in PAGE.iterdir() if p.name != "texts.js")
    named = set(re.findall(r'\bt\("(\w+)"', used)) | set(re.findall(r'data-text="(\w+)"', used))
    assert named <= set(english)
