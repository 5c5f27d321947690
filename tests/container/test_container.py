"""The CPU image, built and run. `.ci/docker-engine` starts an engine where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.e2e.server import REPOSITORY, eventually, free_port

IMAGE = os.environ.get("TEST_IMAGE", "kogpt2-serving:test")
PROMPT = {"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 12}}
TEXT = " 가실 때에는 말없이 고이 보내 드리우리다."
HARDENED = [
    *("--read-only", "--tmpfs", "/run/kogpt2:mode=1777"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"),
]

pytestmark = pytest.mark.container


def docker(*arguments: str, timeout_s: float = 60, check: bool = True) -> str:
    done = subprocess.run(
        ["docker", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session", autouse=True)
def image() -> None:
    docker("build", "-q", "-f", "Dockerfile.cpu", "-t", IMAGE, ".", timeout_s=900)


class Container:
    def __init__(self, *options: str, **environment: str) -> None:
        self.port, self.management_port = free_port(), free_port()
        inside = environment.get("SAGEMAKER_BIND_TO_PORT", "8080")
        command = ["run", "-d", "-p", f"127.0.0.1:{self.port}:{inside}"]
        command += ["-p", f"127.0.0.1:{self.management_port}:8081", *options]
        for name, value in environment.items():
            command += ["-e", f"{name}={value}"]
        self.id = docker(*command, IMAGE).split()[-1]
        try:
            eventually(self.is_ready, 60)
        except AssertionError:
            print(docker("logs", self.id, check=False))
            self.remove()
            raise

    def is_ready(self) -> bool:
        try:
            return requests.get(self.url("/ping"), timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def management(self, path: str) -> str:
        return f"http://127.0.0.1:{self.management_port}{path}"

    def predict(self, name: str, **parameters: Any) -> requests.Response:
        body = {**PROMPT, "parameters": {**PROMPT["parameters"], **parameters}}  # type: ignore[dict-item]
        return requests.post(self.url(f"/predictions/{name}"), json=body, timeout=60)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", self.id))[0]["State"]
        return found

    def remove(self) -> None:
        docker("rm", "-f", "-v", self.id, check=False)


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for container in started:
        container.remove()


def test_it_runs_hardened_in_one_gigabyte_and_answers_on_both_ports(
    containers: list[Container],
) -> None:
    containers.append(container := Container(*HARDENED, "--memory", "1g"))
    load = {"model_name": "소월", "url": "sowol"}
    assert requests.post(container.management("/models"), json=load, timeout=60).ok
    assert container.predict("소월").json()["generated_text"].startswith(TEXT)
    listed = requests.get(container.url("/models"), timeout=10).json()["models"]
    assert listed == [{"modelName": "소월", "modelUrl": "sowol"}]
    assert requests.delete(container.management("/models/소월"), timeout=60).ok
    docker("stop", container.id)
    state = container.state()
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)


@pytest.mark.parametrize("backend", ["mxnet", "onnxruntime"])
def test_both_backends_answer_on_the_port_that_sagemaker_names(
    containers: list[Container], backend: str
) -> None:
    environment = {"SAGEMAKER_BIND_TO_PORT": "9123", "ENGINE_BACKEND": backend}
    containers.append(container := Container(**environment))
    headers = {"X-Amzn-SageMaker-Target-Model": "sowol.tar.gz"}
    answer = requests.post(container.url("/invocations"), json=PROMPT, headers=headers, timeout=60)
    assert answer.json()["generated_text"].startswith(TEXT)


def test_a_stop_lets_requests_in_flight_finish(containers: list[Container]) -> None:
    containers.append(container := Container())
    container.predict("sowol")
    answers: list[int] = []

    def ask() -> None:
        answers.append(container.predict("sowol", max_new_tokens=200).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    started = time.monotonic()
    docker("stop", container.id)
    assert time.monotonic() - started < 10
    for thread in threads:
        thread.join()
    assert answers == [200] * 4
    assert container.state()["ExitCode"] == 0


def test_a_stopped_container_starts_again_and_is_healthy(containers: list[Container]) -> None:
    containers.append(container := Container("--health-interval", "1s"))
    docker("kill", "-s", "KILL", container.id)
    docker("start", container.id)
    eventually(container.is_ready, 60)
    eventually(lambda: container.state()["Health"]["Status"] == "healthy", 60)
    assert container.predict("sowol").ok


def test_another_command_is_run_as_it_is() -> None:
    out = docker("run", "--rm", IMAGE, "bash", "-c", "id -u; ls /opt/kogpt2/model_store")
    assert out.split() == ["10001", "dongju.tar.gz", "sowol.tar.gz"]


def test_the_image_says_what_it_can_do() -> None:
    labels = json.loads(docker("inspect", IMAGE))[0]["Config"]["Labels"]
    for name in ("multi-models", "accept-bind-to-port"):
        assert labels[f"com.amazonaws.sagemaker.capabilities.{name}"] == "true"
