"""scripts/build and scripts/run, as a person calls them."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.containers import IMAGE, START_S, docker
from tests.e2e.server import REPOSITORY, Client, eventually, free_port
from tests.e2e.stores import small

pytestmark = pytest.mark.container


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [f"scripts/{arguments[0]}", *arguments[1:]],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Run(Client):
    """`scripts/run` in the foreground of a terminal that nobody sees."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.name = f"kogpt2-test-{secrets.token_hex(4)}"
        self.port, self.management_port = free_port(), free_port()
        self.log = folder / "log"
        ports = ["--port", str(self.port), "--management-port", str(self.management_port)]
        options = [*ports, "--model-store", str(store), "--memory", "2g"]
        options += ["--", "-e", "ENGINE_BACKEND=native"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["scripts/run", "cpu", "--image", IMAGE, "--name", self.name, *options],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def end(self) -> None:
        docker("rm", "-f", self.name, check=False)
        self.process.kill()
        self.process.wait()
        docker("volume", "rm", f"{self.name}-cache", check=False)


@pytest.fixture
def run(image: str, tmp_path: Path) -> Iterator[Run]:
    small(tmp_path / "store" / "봄")
    running = Run(tmp_path, tmp_path / "store")
    try:
        eventually(lambda: "Ctrl-C stops" in running.text(), START_S)
        yield running
    except AssertionError:
        print(running.text())
        raise
    finally:
        running.end()


def test_run_shows_curl_lines_that_work_and_ends_with_ctrl_c(run: Run) -> None:
    lines = re.findall("^curl .*", run.text(), re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        command = [*shlex.split(line), "--silent", "--fail-with-body"]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, line + done.stdout.decode()
        json.loads(done.stdout)
    said = json.loads(docker("inspect", run.name))[0]["HostConfig"]
    bound = [b for bindings in said["PortBindings"].values() for b in bindings]
    assert {b["HostIp"] for b in bound} == {"127.0.0.1"}
    assert {b["HostPort"] for b in bound} == {str(run.port), str(run.management_port)}
    assert said["ReadonlyRootfs"]
    assert said["CapDrop"] == ["ALL"]
    assert said["SecurityOpt"] == ["no-new-privileges"]
    assert said["Memory"] == said["MemorySwap"] == 2 << 30
    assert run.is_ready()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 0
    eventually(lambda: docker("ps", "-aq", "--filter", f"name={run.name}") == "")


@pytest.mark.parametrize("name", ["build", "run"])
def test_help_shows_examples(name: str) -> None:
    done = script(name, "--help")
    assert done.returncode == 0
    assert f"Examples:\n  scripts/{name}" in done.stdout


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["build"], 2, "say cpu, slim or gpu"),
        (["build", "tpu"], 2, "tpu is not known"),
        (["build", "cpu", "--tag"], 2, "--tag needs a name"),
        (["run", "--prot", "1"], 2, "--prot is not known"),
        (["run", "--port"], 2, "--port needs a value"),
        (["run", "--image", "not:there"], 1, "make it with scripts/build cpu"),
        (["run", "--image", IMAGE, "--model-store", "/no/folder"], 2, "no folder /no/folder"),
    ],
)
def test_wrong_calls_are_told_what_is_wrong(
    image: str, command: list[str], status: int, said: str
) -> None:
    done = script(*command)
    assert done.returncode == status
    assert said in done.stderr
    assert done.stdout == ""


def test_build_pushes_where_it_is_told(image: str) -> None:
    registry, port = f"registry-{secrets.token_hex(4)}", free_port()
    # Nothing listens there: the push is tried, and its failure is the script's.
    name = f"127.0.0.1:{port}/{registry}:1"
    done = script("build", "cpu", "--tag", image, "--push", name)
    try:
        assert done.returncode == 1
        assert "connection refused" in done.stderr
        assert (
            json.loads(docker("inspect", name))[0]["Id"]
            == docker("inspect", "-f", "{{.Id}}", image).strip()
        )
    finally:
        docker("rmi", name, check=False)
