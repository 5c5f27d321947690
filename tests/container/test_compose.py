"""compose.yaml: one command starts the server and a store, and a call loads a model from S3."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import requests

from tests.container.containers import PROMPT, START_S, TEXT, docker
from tests.e2e.server import REPOSITORY, eventually, free_port

pytestmark = pytest.mark.container

STORE_IMAGE = "kogpt2-store:test"


def compose_command() -> list[str]:
    plugin = subprocess.run(
        ["docker", "compose", "version"], capture_output=True, timeout=30, check=False
    )
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")


@pytest.fixture(scope="module")
def port(image: str) -> Iterator[int]:
    """Of requests to the server that `up` started."""
    compose = [*compose_command(), "-p", f"kogpt2-{secrets.token_hex(4)}"]
    store = ["build", "-f", "tests/container/store/Dockerfile", "-t", STORE_IMAGE]
    docker(*store, "--build-arg", f"IMAGE={image}", ".", timeout_s=300)
    port = free_port()
    environment = {
        **os.environ,
        "KOGPT2_IMAGE": image,
        "STORE_IMAGE": STORE_IMAGE,
        "PORT": str(port),
        "MANAGEMENT_PORT": str(free_port()),
    }

    def run(*arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*compose, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    try:
        up = run("up", "-d")
        assert up.returncode == 0, up.stdout + run("logs", "--no-color").stdout
        eventually(lambda: healthy(port), START_S)
        yield port
    finally:
        run("down", "--volumes")


def healthy(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/ping", timeout=5).ok
    except requests.RequestException:
        return False


def test_a_call_loads_a_demo_model_from_the_store(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    offered = requests.get(f"{url}/models?available=true", timeout=30).json()["models"]
    assert {"sowol", "dongju"} <= {model["modelName"] for model in offered}
    answer = requests.post(f"{url}/predictions/sowol", json=PROMPT, timeout=90)
    assert answer.json()["generated_text"].startswith(TEXT)
    metrics = requests.get(f"{url}/metrics", timeout=60).text
    fetched = next(r for r in metrics.splitlines() if r.startswith("kogpt2_fetched_bytes_total "))
    assert float(fetched.split()[1]) > 1_000_000  # over the network
