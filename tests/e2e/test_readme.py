"""README.md is true: its session is run, its table of settings is the code's."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.e2e.console import session
from tests.e2e.server import REPOSITORY, Server

SESSIONS = ("README.md", "docs/api/requests.md")
SETTINGS = ("docs/reference/settings.md", "docs/reference/settings.ko.md")


@pytest.mark.parametrize("page", SESSIONS)
def test_the_session_answers_as_it_is_shown(server: Server, page: str) -> None:
    commands = session(REPOSITORY / page)
    assert commands
    assert session((REPOSITORY / page).with_suffix(".ko.md")) == commands
    unload = [c for c in commands if "DELETE" in c[0]]
    for command, shown in [*(c for c in commands if c not in unload), *unload]:
        line = command.replace("localhost:8080", f"127.0.0.1:{server.port}")
        line = line.replace("localhost:8081", f"127.0.0.1:{server.management_port}")
        done = subprocess.run(
            [*shlex.split(line), "--silent"], capture_output=True, timeout=60, check=True
        )
        answer, expected = json.loads(done.stdout), json.loads(shown)
        for value in (answer, expected):
            if isinstance(value, dict):
                value.pop("seconds", None)
        assert answer == expected, command
    server.unload("sowol")


def test_the_programs_of_the_readme_print_what_the_model_answers(server: Server) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    program = program.replace("http://localhost:8080", server.url(""))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    by_boto3 = done.stdout.splitlines()[-1]  # OpenAI's is drawn, and may hold any text before it
    text, steps, _ = json.loads(by_boto3)
    assert text.startswith("나 보기가 역겨워")
    assert steps > 1


@pytest.mark.parametrize("page", SETTINGS)
def test_the_table_of_settings_is_the_codes(page: str) -> None:
    table = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "settings"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    if page == SETTINGS[0]:
        assert table in text, "kogpt2 settings prints the table"
    for variable, default in re.findall(r"^\| `(\w+)` \| (\S.*?) \|", table, re.MULTILINE):
        assert f"| `{variable}` | {default} |" in text, variable
