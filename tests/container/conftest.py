"""The image, built once by scripts/build, and containers of it that are removed in the end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.container.containers import HARDENED, IMAGE, Container
from tests.e2e.server import REPOSITORY

BUILD_S = 900
Start = Callable[..., Container]


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where there is no Docker."""
    if (
        shutil.which("docker") is None
        or subprocess.run(
            ["docker", "info"], capture_output=True, timeout=30, check=False
        ).returncode
    ):
        pytest.skip("no Docker engine answers; .ci/docker-engine starts one on Debian")


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """Its name."""
    done = subprocess.run(
        ["scripts/build", "cpu", "--tag", IMAGE],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return IMAGE


@pytest.fixture
def start(image: str) -> Iterator[Start]:
    """Starts containers like `Container`, and waits until they are ready."""
    started: list[Container] = []

    def start_one(*options: str, command: tuple[str, ...] = (), **environment: str) -> Container:
        started.append(Container(*options, command=command, **environment))
        return started[-1].wait_until_ready()

    yield start_one
    for container in started:
        container.remove()


@pytest.fixture(scope="session")
def shared(image: str) -> Iterator[Container]:
    """A hardened container in one gigabyte, as healthy after each test as before."""
    container = Container(*HARDENED, "--memory", "1g", "--memory-swap", "1g")
    try:
        yield container.wait_until_ready()
    finally:
        container.remove()
