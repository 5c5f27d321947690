"""docs/models/handlers.md is true: its models are made, its commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import REPOSITORY, Server

DOCUMENTS = REPOSITORY / "docs" / "models"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
DEMO = ("sowol.params", "sowol.spiece", "config.json")


def blocks(document: str, kind: str | None = None) -> list[tuple[str, str]]:
    found = BLOCK.findall((DOCUMENTS / document).read_text(encoding="utf-8"))
    return [(k, text) for k, text in found if kind in (None, k)]


def write_models(store: Path) -> None:
    """Each listing is a model; the blocks after it that begin with a path are its files."""
    folder, listed = store, set[str]()
    for _, text in blocks("handlers.md"):
        first, _, rest = text.partition("\n")
        if first.endswith("/"):
            assert not listed, f"{folder.name} lacks {listed}"
            folder, listed = store / first.rstrip("/"), {line.strip() for line in rest.splitlines()}
            with tarfile.open(REPOSITORY / "model_store" / "sowol.tar.gz") as demo:
                for name in sorted(listed & set(DEMO)):
                    demo.extract(name, folder, filter="data")
            listed -= set(DEMO)
        elif first.startswith("# "):
            path = first.removeprefix("# ")
            listed.remove(path)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(rest, encoding="utf-8")
    assert not listed, f"{folder.name} lacks {listed}"


def commands() -> list[tuple[str, str]]:
    """(command, shown output) of every `$ ` line."""
    found = []
    for _, text in blocks("handlers.md", "console"):
        for part in ("\n" + text).split("\n$ ")[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.strip()))
    return found


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    write_models(clean.store)
    return clean


def run(server: Server, command: str) -> str:
    """In the folder that a reader is in: the models, or `model_store` with them."""
    line = command.replace("localhost:8080", f"127.0.0.1:{server.port}")
    line = line.replace("localhost:8081", f"127.0.0.1:{server.management_port}")
    arguments = shlex.split(line.replace("--export-path model_store", "--export-path ."))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if arguments[0] == "curl":
        arguments.append("--silent")
    done = subprocess.run(
        arguments,
        cwd=server.store,
        capture_output=True,
        timeout=90,
        check=True,
        env={**os.environ, "PATH": path},
    )
    return done.stdout.decode()


def comparable(value: Any) -> Any:
    """Without what takes another time each time: the guide's answer ends with seconds."""
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        return value[:2]
    return value


@pytest.mark.parametrize(("command", "shown"), commands())
def test_the_commands_answer_as_they_are_shown(server: Server, command: str, shown: str) -> None:
    answer = run(server, command)
    if shown:
        assert comparable(json.loads(answer)) == comparable(json.loads(shown)), answer
    else:
        assert not answer


def test_the_guides_loop_gives_the_built_in_handlers_text_and_steps(server: Server) -> None:
    guide = json.loads(run(server, next(c for c, _ in commands() if "predictions/guide" in c)))
    plain = server.store / "plain"
    plain.mkdir()
    with tarfile.open(REPOSITORY / "model_store" / "sowol.tar.gz") as demo:
        demo.extractall(plain, filter="data")
    answer = server.predict("plain", "나는").json()
    assert answer[:2] == guide[:2]


def test_the_korean_document_has_the_same_examples() -> None:
    assert blocks("handlers.ko.md") == blocks("handlers.md")
