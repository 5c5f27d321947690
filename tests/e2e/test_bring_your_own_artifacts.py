"""docs/models/artifacts.md, adapters.md and deltas.md are true: their commands are run, one page
after the other, and answer as it is shown. That the Korean pages have the same: test_pages.py."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.console import blocks, printed, session, without_seconds
from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import serving

pytestmark = pytest.mark.slow

MODELS = REPOSITORY / "docs" / "models"
PAGES = [MODELS / "artifacts.md", MODELS / "adapters.md"]
ANYTHING = "…"
# Of a model that is trained here: on another processor the last digits differ.
TRAINED = ("kogpt2 fine-tune ",)
NUMBER = re.compile(r" *\b\d[\d.]*")


@pytest.fixture(scope="module")
def in_int8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("my-models")
    with serving(tmp_path_factory.mktemp("int8"), store, ENGINE_PRECISION="int8") as server:
        yield server


def workplace(store: Path, tmp_path: Path) -> Path:
    """A folder that looks like the repository, but may be written to."""
    for name in ("scripts", "model_store"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "my-models").symlink_to(store)
    # The checkout's would make an environment of its own here.
    command = f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m scripts.start "$@"\n'
    (tmp_path / "kogpt2").write_text(command, encoding="utf-8")
    (tmp_path / "kogpt2").chmod(0o755)
    return tmp_path


def test_the_commands_answer_as_they_are_shown(clean: Server, tmp_path: Path) -> None:
    check(clean, PAGES, workplace(clean.store, tmp_path))


def test_the_commands_of_deltas_answer_as_they_are_shown(in_int8: Server, tmp_path: Path) -> None:
    check(in_int8, [MODELS / "deltas.md"], workplace(in_int8.store, tmp_path))


def check(server: Server, pages: list[Path], folder: Path) -> None:
    for command, shown in (call for page in pages for call in session(page)):
        answer = printed(server, command, folder)
        if shown.startswith("{"):
            expected = without_seconds(json.loads(shown))
            assert without_seconds(json.loads(answer)) == expected, command
        else:
            if any(words in command for words in TRAINED):
                shown = NUMBER.sub(ANYTHING, shown)
            assert fits(answer, shown.split(ANYTHING)), (command, answer)


def fits(text: str, parts: list[str]) -> bool:
    """Whether a text is these parts with anything between them: `re` may take hours to say no."""
    if not text.startswith(parts[0]):
        return False
    at = len(parts[0])
    for part in parts[1:]:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return at == len(text) or parts[-1] == ""


def test_a_template_of_the_page_is_one_that_the_server_reads(tmp_path: Path) -> None:
    from engine.artifacts.open import open_artifact
    from engine.text.prompts import Prompts
    from tests.engine.hugging_face import make_hugging_face
    from tests.engine.models import make_artifact

    [shown] = blocks(PAGES[0], "json")
    [other] = re.findall(r"`(<usr>\{text\}</s>[^`]*)`", PAGES[0].read_text("utf-8"))
    for make, template in ((make_hugging_face, None), (make_artifact, other)):
        folder = make(tmp_path / make.__name__)
        said = json.loads(shown)
        said["template"] = template or said["template"]
        (folder / "generation.json").write_text(json.dumps(said), encoding="utf-8")
        prompts = Prompts(open_artifact(folder))
        ids = prompts.encode("오늘은")
        assert ids[0] == prompts.tokenizer.token_id("<usr>")
        assert ids[-1] == prompts.tokenizer.token_id("<sys>")
        assert prompts.tokenizer.token_id("<unused1>") in ids
