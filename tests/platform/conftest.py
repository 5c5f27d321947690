"""Servers as the platform starts its containers, and fine-tunes in S3."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.stores import FAST
from tests.platform.agent import Agent
from tests.platform.disk import Disk
from tests.platform.fine_tunes import PREFIX, publish
from tests.processes import kill_at_once, readable_by_all
from tests.serving.store.s3 import BUCKET, S3Server, s3_server

IS_ROOT = os.geteuid() == 0
A_USER = 10001
FITTING, MEMORY_MIB = 6, "11"  # see tests.e2e.stores.SMALL_BYTES
MODELS = 30


class Container:
    """A server with SageMaker's settings and a folder as /opt/ml; it can be replaced.

    Where the tests are root it starts as root, like the platform's containers, and only root may
    read the models. `base_dir` stands for /opt/ml, so that no root path is needed.
    """

    def __init__(self, folder: Path, s3: S3Server) -> None:
        self._folder = folder
        self._starts = 0
        self.start()
        models = folder / "ml" / "models"
        disk = Disk(models, s3.client, BUCKET, PREFIX, closed=IS_ROOT)
        self.agent = Agent(self.server.url(""), disk, str(models))

    def start(self) -> None:
        self._starts += 1
        folder = self._folder / f"start-{self._starts}"
        folder.mkdir(parents=True)
        environment = {
            **FAST,
            "ENGINE_MEMORY_MIB": MEMORY_MIB,
            "ENGINE_OVERCOMMIT": "1",
            "SAGEMAKER_MULTI_MODEL": "true",
            "SAGEMAKER_BASE_DIR": str(self._folder / "ml"),
            **({"RUN_AS_USER": str(A_USER)} if IS_ROOT else {}),
        }
        prefix = readable_by_all(sys.executable) if IS_ROOT else ()
        self.server = Server(folder, None, environment, options=False, prefix=prefix)

    def replace(self) -> None:
        """Starts a new container on the same disk."""
        self.start()
        self.agent.url = self.server.url("")
        self.server.wait_until_ready()
        self.agent.forget_all()

    def kill(self) -> None:
        """Ends everything, as when the container's first process ends."""
        kill_at_once(self.server.process.pid)
        self.server.process.wait(10)

    def stop(self) -> None:
        if self.server.process.poll() is None:
            self.server.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="session")
def texts(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each fine-tune by its TargetModel."""
    return publish(s3, tmp_path_factory.mktemp("fine-tunes"), MODELS)
