"""The examples that pages show, run at a server."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.server import REPOSITORY, Server


def blocks(page: Path, language: str = r"\w+") -> list[str]:
    """Return the code blocks of a page in that language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def session(page: Path) -> list[tuple[str, str]]:
    """(command, shown output) of every `$ ` line in the console blocks."""
    found = []
    for block in blocks(page, "console"):
        for part in ("\n" + block).split("\n$ ")[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.strip()))
    return found


def here(server: Server, example: str) -> str:
    example = example.replace("localhost:8080", f"127.0.0.1:{server.port}")
    return example.replace("localhost:8081", f"127.0.0.1:{server.management_port}")


def printed(server: Server, command: str, folder: Path = REPOSITORY) -> str:
    """Run a command against this server, with this Python's programs, and return its output."""
    line = here(server, command).replace("curl ", "curl --silent --max-time 60 ")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.strip()


def ran(server: Server, program: str) -> str:
    """Run a program against this server and return its output."""
    code = compile(here(server, program), "page", "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})  # noqa: S102
    return out.getvalue()


def without_seconds(answer: Any) -> Any:
    if isinstance(answer, dict):
        answer.pop("seconds", None)
    return answer
