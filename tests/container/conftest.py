"""The image, built once by scripts/build, and containers of it that are removed in the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.container.containers import BUILD_S, HARDENED, IMAGE, Container, program

Start = Callable[..., Container]


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where there is no Docker."""
    if shutil.which("docker") is None or program("docker", "info", timeout_s=30).returncode:
        pytest.skip("no Docker engine answers; .ci/docker-engine starts one on Debian")


def build(*arguments: str) -> None:
    done = program("scripts/build", *arguments, timeout_s=BUILD_S)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """The name of the built image."""
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
    with ExitStack() as started:

        def start_one(*options: str, **given: Any) -> Container:
            return started.enter_context(closing(Container(*options, **given))).wait_until_ready()

        yield start_one


@pytest.fixture(scope="session")
def shared(image: str) -> Iterator[Container]:
    """A hardened container in one gigabyte, as healthy after each test as before."""
    memory = ("--memory", "1g", "--memory-swap", "1g")
    with closing(Container(*HARDENED, *memory)) as container:
        yield container.wait_until_ready()
