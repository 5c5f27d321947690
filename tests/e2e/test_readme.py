"""README.md is true: its models continue their poems, its session is run, its table of settings is
the code's."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.console import blocks, printed, ran, session, without_seconds
from tests.e2e.server import REPOSITORY, Server, eventually
from tests.e2e.stores import greedy
from tests.scripts.command import run

SESSIONS = ("README.md", "docs/api/requests.md")
SETTINGS = ("docs/reference/settings.md", "docs/reference/settings.ko.md")


def test_both_demo_models_continue_their_poems(server: Server) -> None:
    for name, prompt, poem in (
        ("sowol", "나 보기가 역겨워", "가실 때에는"),
        ("dongju", "죽는 날까지 하늘을 우러러", "한 점 부끄럼이 없기를"),
    ):
        assert server.load(name).status_code == 200
        assert greedy(server, name, 40, prompt).lstrip().startswith(poem)
        assert server.unload(name).status_code == 200
    eventually(lambda: not server.descendants("model_service_worker"))


@pytest.mark.parametrize("page", SESSIONS)
def test_the_session_answers_as_it_is_shown(server: Server, page: str) -> None:
    commands = session(REPOSITORY / page)
    assert commands
    unload = [c for c in commands if "DELETE" in c[0]]
    for command, shown in [*(c for c in commands if c not in unload), *unload]:
        answer = without_seconds(json.loads(printed(server, command)))
        assert answer == without_seconds(json.loads(shown)), command
    server.unload("sowol")


def test_the_programs_of_the_readme_print_what_the_model_answers(server: Server) -> None:
    (program,) = blocks(REPOSITORY / "README.md", "python")
    by_boto3 = ran(server, program).splitlines()[
        -1
    ]  # OpenAI's is drawn, and may hold any text before it
    text, steps, _ = json.loads(by_boto3)
    assert text.startswith("나 보기가 역겨워")
    assert steps > 1


@pytest.mark.parametrize("page", SETTINGS)
def test_the_table_of_settings_is_the_codes(page: str) -> None:
    table = run("settings").stdout.strip()
    assert table
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    if page == SETTINGS[0]:
        assert table in text, "kogpt2 settings prints the table"
    for variable, default in re.findall(r"^\| `(\w+)` \| (\S.*?) \|", table, re.MULTILINE):
        assert f"| `{variable}` | {default} |" in text, variable
