"""The pages name what is there, say the same in both languages, by what can be compared without
understanding them, and keep to their glossary."""

from __future__ import annotations

import re
import subprocess
from itertools import groupby
from pathlib import Path
from unicodedata import normalize

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = Path("docs/develop/glossary.ko.md")  # has no page beside it
KOREAN = sorted(
    {page.relative_to(ROOT) for page in [*ROOT.glob("*.ko.md"), *(ROOT / "docs").rglob("*.ko.md")]}
    - {GLOSSARY}
)
PAGES = sorted(
    page.relative_to(ROOT)
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
)
CONSOLE = Path("serving/console/page/texts.js")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?<=\s)(#|//) .*$", re.MULTILINE)
NAMES = re.compile(
    r"--[a-z][a-z-]+|\b[A-Z]+_[A-Z0-9_]+\b|\btest_\w+|[\w./-]+\.(?:py|json|yaml|txt|gz)\b",
    re.ASCII,  # a Korean particle ends a name
)


FOLDERS = "benchmarks|common|compat|engine|handlers|serving|scripts|deploy|testbed|tests"
OURS = re.compile(rf"`((?:{FOLDERS}|requirements|docs)/[\w./-]*\w)`")
TESTS = re.compile(r"`(test_\w+)`")
CODE = re.compile(r"`([^`\n]+)`")
MENTION = re.compile(r"(?<![\w/])docs/[\w./-]*\.(?:md|json|png)\b")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def english(page: Path) -> str:
    return (ROOT / str(page).replace(".ko.md", ".md")).read_text("utf-8")


def headings(text: str) -> list[int]:
    """Return the levels of a page's headings."""
    return [len(line.split()[0]) for line in FENCE.sub("", text).splitlines() if line[:1] == "#"]


def tables(text: str) -> list[list[int]]:
    """Return the number of cells of each row, by table."""
    rows = [line.replace("\\|", "").count("|") for line in FENCE.sub("", text).splitlines()]
    return [list(group) for is_table, group in groupby(rows, bool) if is_table]


def blocks(text: str) -> list[str]:
    """What is in fences, without the comments, which are in the page's language; of those that say
    no language of their own, drawings and listings, only that they are there."""
    return [COMMENT.sub("", b) if b[3] != "\n" else "" for b in FENCE.findall(text)]


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.fixture(scope="module")
def tests() -> set[str]:
    files = list((ROOT / "tests").rglob("test_*.py"))
    names = {name for f in files for name in re.findall(r"def (test_\w+)", f.read_text("utf-8"))}
    return names | {file.stem for file in files}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_a_page_and_its_heading(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", (ROOT / page).read_text("utf-8"))):
        path, _, anchor = link.partition("#")
        if not link.startswith(("http:", "https:")):
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_a_page_that_a_file_names_is_there() -> None:
    """Code, its messages, comments and configuration name pages by their path from the root."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    dead = []
    for name in names:
        file = ROOT / name
        if file.is_file() and file.suffix not in (".png", ".gz", ".json"):
            text = file.read_text("utf-8", errors="ignore")
            dead += [(name, page) for page in MENTION.findall(text) if not (ROOT / page).exists()]
    assert dead == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=str)
def test_files_and_tests_that_a_page_names_are_there(page: Path, tests: set[str]) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert [file for file in OURS.findall(text) if not (ROOT / file).exists()] == []
    assert set(TESTS.findall(text)) - tests == set()


@pytest.mark.parametrize("page", KOREAN, ids=str)
def test_a_page_has_the_same_parts_in_both_languages(page: Path) -> None:
    korean, other = (ROOT / page).read_text("utf-8"), english(page)
    assert headings(korean) == headings(other)
    assert tables(korean) == tables(other)
    assert blocks(korean) == blocks(other)


@pytest.mark.parametrize("page", KOREAN, ids=str)
def test_a_page_names_the_same_things_in_both_languages(page: Path) -> None:
    """All that is in backticks, and elsewhere options, settings, tests and files."""
    texts = (ROOT / page).read_text("utf-8"), english(page)
    korean, other = ({*NAMES.findall(text), *CODE.findall(FENCE.sub("", text))} for text in texts)
    assert korean ^ other == set()


def terms(column: int) -> list[str]:
    """Return the words in a column of the glossary's table."""
    rows = re.findall(r"^\|(.*)\|$", (ROOT / GLOSSARY).read_text("utf-8"), re.MULTILINE)[2:]
    return [word.strip() for row in rows for word in row.split("|")[column].split(",")]


def pattern(words: list[str]) -> re.Pattern[str]:
    """Those words where one begins, verbs in all forms: of 올리다 also 올린, 올립니다 and 올려. In
    decomposed Hangul (NFD) all of them begin with the stem, the last ㅣ of which may become ㅕ."""
    stems = (re.sub("(?<=.)다$", "", word) for word in words)
    decomposed = (re.sub("\u1175$", "[\u1175\u1167]", normalize("NFD", stem)) for stem in stems)
    return re.compile(rf"(?<!\w)(?:{'|'.join(decomposed)})", re.IGNORECASE)


def avoided(text: str) -> list[str]:
    """Words of the glossary's last column in a Korean text, as it has them."""
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+", "_", FENCE.sub("", text))
    prose = pattern(terms(1)).sub("_", normalize("NFD", prose))
    return [
        normalize("NFC", prose[found.start() : found.end() + 20].split("\n")[0])
        for found in pattern(terms(2)).finditer(prose)
    ]


@pytest.mark.parametrize("page", KOREAN, ids=str)
def test_a_korean_page_keeps_to_the_glossary(page: Path) -> None:
    assert avoided((ROOT / page).read_text("utf-8")) == []


def test_the_console_keeps_to_the_glossary() -> None:
    texts = (ROOT / CONSOLE).read_text("utf-8")
    assert "저장소" in texts
    assert avoided(texts) == []


def test_the_glossary_knows_the_forms_of_a_word_and_no_others() -> None:
    found = avoided("모델을 올려서, `올린`, 내립니다. 내려받고 끌어올리며 지켜보다 켜집니다.")
    assert [words.split()[0] for words in found] == ["올려서,", "내립니다.", "켜집니다."]
