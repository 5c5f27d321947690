"""The compose files as a person starts them, with stand-ins for images that may be out of reach."""

from __future__ import annotations

import os
import secrets
import shutil

import pytest

from tests.container.containers import BUILD_S, docker, program
from tests.e2e.server import Client, free_port

STORE_IMAGE = "kogpt2-store:test"


class Compose(Client):
    def __init__(self, file: str, image: str, **environment: str) -> None:
        """`image` is the server's."""
        self._command = [*compose_program(), "-p", f"kogpt2-{secrets.token_hex(4)}", "-f", file]
        # Not on the server's, which has another name each time that it is built.
        store = ["-f", "tests/container/store/Dockerfile", "-t", STORE_IMAGE]
        docker("build", *store, "requirements", timeout_s=BUILD_S)
        self.port, self.management_port = free_port(), free_port()
        self._environment = {
            **os.environ,
            "KOGPT2_IMAGE": image,
            "STORE_IMAGE": STORE_IMAGE,
            "PORT": str(self.port),
            "MANAGEMENT_PORT": str(self.management_port),
            **environment,
        }

    def run(self, *arguments: str) -> tuple[int, str]:
        """The exit status, and what it prints on either stream."""
        done = program(*self._command, *arguments, timeout_s=300, env=self._environment)
        return done.returncode, done.stdout

    def up(self, *services: str) -> None:
        """Start these services and what they depend on, or all."""
        status, said = self.run("up", "-d", *services)
        assert status == 0, said + self.run("logs", "--no-color")[1]

    def close(self) -> None:
        self.run("down", "--volumes")


def compose_program() -> list[str]:
    if program("docker", "compose", "version", timeout_s=30).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")
