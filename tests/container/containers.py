"""Containers as a person starts them, on free ports of loopback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from tests.e2e.server import REPOSITORY, START, START_S, Client, eventually, free_port

IMAGE = os.environ.get("TEST_IMAGE", "kogpt2-serving:test")

BUILD_S = 600
# Also as a user that the image does not know.
HARDENED = [
    *("--read-only", "--tmpfs", "/run/kogpt2:mode=1777"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"),
]
# As scripts/run gives it: on disk, what is fetched and prepared.
CACHE = [
    *("-v", "/var/cache/kogpt2", "-e", "MODEL_CACHE=/var/cache/kogpt2/models"),
    *("-e", "ENGINE_CACHE_DIR=/var/cache/kogpt2/prepared"),
]
PROMPT = {"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 12}}
TEXT = " 가실 때에는 말없이 고이 보내 드리우리다."

# Run inside: sends a signal to the processes whose command line has some words, and lists them.
SIGNAL = """
import psutil, sys
lines = {p: " ".join([*(p.info["cmdline"] or ()), ""]) for p in psutil.process_iter(["cmdline"])}
ours = (1, psutil.Process().pid)
found = [p for p, line in lines.items() if sys.argv[2] in line and p.pid not in ours]
for process in found:
    process.send_signal(int(sys.argv[1]))
print(len(found))
"""


def program(
    *command: str, timeout_s: float, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Runs a program of the checkout; its `stdout` has what it prints on either stream."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def docker(*arguments: str, timeout_s: float = 60, check: bool = True) -> str:
    """Run docker and return its output, stdout and stderr together."""
    done = program("docker", *arguments, timeout_s=timeout_s)
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


class Container(Client):
    """A running server, until it is closed."""

    def __init__(
        self, *options: str, image: str = IMAGE, command: tuple[str, ...] = (), **environment: str
    ) -> None:
        self.port, self.management_port = free_port(), free_port()
        inside = environment.get("SAGEMAKER_BIND_TO_PORT", "8080")
        run = ["run", "-d", "-p", f"127.0.0.1:{self.port}:{inside}"]
        run += ["-p", f"127.0.0.1:{self.management_port}:8081", *options]
        for name, value in {**START, **environment}.items():
            run += ["-e", f"{name}={value}"]
        self.id = docker(*run, image, *command).split()[-1]

    def wait_until_ready(self) -> Container:
        try:
            eventually(lambda: self.is_ready() or not self.state()["Running"], START_S)
            assert self.state()["Running"]
        except AssertionError:
            print(self.log())
            raise
        return self

    def predict(self, name: str, body: Any = PROMPT, **headers: str) -> requests.Response:
        return super().predict(name, body, **headers)

    def running(self) -> int:
        """Sequences that the engine works on."""
        rows = self.get("/metrics").text.splitlines()
        return int(sum(float(r.split()[-1]) for r in rows if r.startswith("kogpt2_model_running{")))

    def signal(self, number: int, words: str) -> None:
        """Signal the processes inside whose command line has `words`."""
        done = docker("exec", self.id, "python", "-c", SIGNAL, str(int(number)), words)
        assert int(done) > 0, f"no process has {words!r}"

    def log(self) -> str:
        return docker("logs", self.id)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", self.id))[0]["State"]
        return found

    def health(self) -> str:
        status: str = self.state()["Health"]["Status"]
        return status

    def close(self) -> None:
        docker("rm", "-f", "-v", self.id, check=False)


def mount(folder: Path, place: str) -> list[str]:
    return ["-v", f"{folder}:{place}:ro"]
