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

READMES = ("README.md", "README.ko.md")


@pytest.mark.parametrize("readme", READMES)
def test_the_session_answers_as_it_is_shown(server: Server, readme: str) -> None:
    commands = session(REPOSITORY / readme)
    assert len(commands) >= 5
    # The wrong request stands apart in the text, after the model was unloaded.
    unload = next(c for c in commands if "DELETE" in c[0])
    for command, shown in [*(c for c in commands if c is not unload), unload]:
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


@pytest.mark.parametrize("readme", READMES)
def test_the_table_of_settings_is_the_codes(readme: str) -> None:
    table = subprocess.run(
        [sys.executable, "scripts/settings"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    variables = re.findall(r"^\| `(\w+)` \| (\S.*?) \|", table, re.MULTILINE)
    text = (REPOSITORY / readme).read_text(encoding="utf-8")
    for variable, default in variables:
        assert f"| `{variable}` | {default} |" in text, variable


def test_both_tables_of_differences_name_the_same_things() -> None:
    english, korean = (
        [
            sorted(re.findall(r"`([^`]+)`", line))
            for line in (REPOSITORY / "docs" / name).read_text(encoding="utf-8").splitlines()
            if line.startswith("|")
        ]
        for name in ("differences.md", "differences.ko.md")
    )
    assert english == korean
