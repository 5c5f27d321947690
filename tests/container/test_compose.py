"""The compose files: one command starts servers and a store, and a call loads a model from S3."""

from __future__ import annotations

import contextlib
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

STAND_INS = {"store": "kogpt2-store:test", "proxy": "kogpt2-proxy:test"}


def compose_command() -> list[str]:
    plugin = subprocess.run(
        ["docker", "compose", "version"], capture_output=True, timeout=30, check=False
    )
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")


@contextlib.contextmanager
def up(image: str, *what: str, file: str = "compose.yaml") -> Iterator[int]:
    """The port of requests to what compose has started, with stand-ins for images of others."""
    compose = [*compose_command(), "-p", f"kogpt2-{secrets.token_hex(4)}", "-f", file]
    for name, tag in STAND_INS.items():
        build = ["build", "-f", f"tests/container/{name}/Dockerfile", "-t", tag]
        docker(*build, "--build-arg", f"IMAGE={image}", ".", timeout_s=300)
    port = free_port()
    environment = {
        **os.environ,
        "KOGPT2_IMAGE": image,
        **{f"{name.upper()}_IMAGE": tag for name, tag in STAND_INS.items()},
        "PORT": str(port),
        "MANAGEMENT_PORT": str(free_port()),
        "NODE_MEMORY": "2g",
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
        started = run("up", "-d", *what)
        assert started.returncode == 0, started.stdout + run("logs", "--no-color").stdout
        eventually(lambda: healthy(port), START_S)
        yield port
    finally:
        run("down", "--volumes")


def healthy(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/ping", timeout=5).ok
    except requests.RequestException:
        return False


def test_a_call_loads_a_demo_model_from_the_store(image: str) -> None:
    with up(image) as port:
        url = f"http://127.0.0.1:{port}"
        offered = requests.get(f"{url}/models?available=true", timeout=30).json()["models"]
        assert {"sowol", "dongju"} <= {model["modelName"] for model in offered}
        answer = requests.post(f"{url}/predictions/sowol", json=PROMPT, timeout=90)
        assert answer.json()["generated_text"].startswith(TEXT)
        metrics = requests.get(f"{url}/metrics", timeout=10).text
        fetched = [r for r in metrics.splitlines() if r.startswith("kogpt2_fetched_bytes_total ")]
        assert float(fetched[0].split()[1]) > 1_000_000  # over the network


def test_three_servers_have_one_address(image: str) -> None:
    """Prometheus and Grafana are left out, whose images cannot be had everywhere."""
    with up(image, "proxy", file="compose.fleet.yaml") as port:
        url = f"http://127.0.0.1:{port}"
        answers = [
            requests.post(f"{url}/predictions/sowol", json=PROMPT, timeout=90) for _ in range(4)
        ]
        for answer in answers:
            assert answer.json()["generated_text"].startswith(TEXT)
        assert len({answer.headers["x-served-by"] for answer in answers}) == 1
        assert requests.post(f"{url}/models", json={"url": "sowol"}, timeout=30).status_code == 403
