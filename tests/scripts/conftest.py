"""A server and endpoints for the clients' commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import packed, serving, small
from tests.platform.agent import Agent
from tests.platform.disk import Disk
from tests.platform.endpoint import Endpoint, SingleModel
from tests.platform.runtime import runtime
from tests.scripts import command
from tests.serving.store.s3 import BUCKET, s3_server

NAMES = ("m0", "m1", "시/봄")
Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Poets:
    """A multi-model endpoint `poets`, one of a single model, `one`, and a client's variables."""

    agent: Agent
    environment: dict[str, str]


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs a command; None removes a variable. Where the locale is set, and for a load test, which
    continues in another Python, in a process of its own."""

    def run_script(
        name: str, *args: str | Path, stdin: str | bytes = b"", **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        variables = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
        if "LC_ALL" not in environment and name != "load-test":
            return command.run(name, *args, stdin=given, environment=variables)
        done = subprocess.run(
            [sys.executable, "-m", "scripts.start", name, *args],
            input=given,
            capture_output=True,
            timeout=120,
            cwd=REPOSITORY,
            env=variables,
        )
        out, err = done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    return run_script


@pytest.fixture(scope="session")
def model_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models as archives, by the names in `NAMES`."""
    folder = tmp_path_factory.mktemp("clients")
    for seed, name in enumerate(NAMES):
        model = small(folder / "unpacked" / str(seed), seed)
        packed(model, folder / "store" / f"{name}.tar.gz")
    return folder / "store"


@pytest.fixture(scope="session")
def served(model_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model in /opt/ml/model, too, which answers `/invocations` without a name."""
    folder = tmp_path_factory.mktemp("served")
    small(folder / "ml" / "model", 0)
    with serving(folder, model_store, SAGEMAKER_BASE_DIR=str(folder / "ml")) as server:
        yield server


def platform_of(served: Server, s3: Any, bucket: str, prefix: str) -> Agent:
    """The platform that gives the server the models of an endpoint."""
    folder = served.run_dir.parent / "ml" / "models"
    return Agent(served.url(""), Disk(folder, s3, bucket, prefix), str(folder))


@pytest.fixture(scope="session")
def poets(served: Server, model_store: Path) -> Iterator[Poets]:
    with s3_server() as s3:
        for name in NAMES:
            s3.put(f"poets/{name}.tar.gz", (model_store / f"{name}.tar.gz").read_bytes())
        agent = platform_of(served, s3.client, BUCKET, "poets/")
        one = Endpoint("one", [SingleModel(served.url(""))])
        with runtime(Endpoint("poets", [agent]), one) as api:
            yield Poets(agent, {**api.environment, "AWS_ENDPOINT_URL_CLOUDWATCH": s3.url})
