"""The image, built once by scripts/build, and containers of it that are removed in the end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container.containers import BUILD_S, HARDENED, IMAGE, Container
from tests.e2e.server import REPOSITORY

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


def build(*arguments: str) -> None:
    done = subprocess.run(
        ["scripts/build", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """Its name."""
    build("cpu", "--tag", IMAGE)
    return IMAGE


@pytest.fixture(scope="session")
def slim(image: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of the image without MXNet, and the file that says what is in it."""
    name, sbom = f"{IMAGE}-slim", tmp_path_factory.mktemp("sbom") / "sbom.json"
    build("slim", "--tag", name, "--sbom", str(sbom))
    return name, sbom


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
