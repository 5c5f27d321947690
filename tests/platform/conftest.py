"""Servers as the platform starts its containers, and fine-tunes in S3."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

    def __init__(
        self, folder: Path, s3: S3Server, memory_mib: str = MEMORY_MIB, **options: Any
    ) -> None:
        self._folder, self._memory_mib, self._s3 = folder, memory_mib, s3
        self._starts = 0
        self.server = self.start()
        self.agent = self._new_agent(**options)

    def _new_agent(self, **options: Any) -> Agent:
        models = self._folder / "ml" / "models"
        disk = Disk(models, self._s3.client, BUCKET, PREFIX, closed=IS_ROOT)
        return Agent(self.server.url(""), disk, str(models), **options)

    def start(self) -> Server:
        self._starts += 1
        folder = self._folder / f"start-{self._starts}"
        folder.mkdir(parents=True)
        environment = {
            **FAST,
            "ENGINE_MEMORY_MIB": self._memory_mib,
            "ENGINE_OVERCOMMIT": "1",
            "SAGEMAKER_MULTI_MODEL": "true",
            "SAGEMAKER_BASE_DIR": str(self._folder / "ml"),
            **({"RUN_AS_USER": str(A_USER)} if IS_ROOT else {}),
        }
        prefix = readable_by_all(sys.executable) if IS_ROOT else ()
        self.server = Server(folder, None, environment, options=False, prefix=prefix)
        return self.server

    def replace(self) -> None:
        """Starts a new container on the same disk."""
        self.start()
        self.agent.url = self.server.url("")
        self.server.wait_until_ready()
        self.agent.forget_all()

    @contextlib.contextmanager
    def afresh(self, **options: Any) -> Iterator[Agent]:
        """Another agent; nothing is on its disk or loaded before and after."""
        self._empty()
        self.agent = self._new_agent(**options)
        try:
            yield self.agent
        finally:
            self._empty()
            self.agent = self._new_agent()

    def _empty(self) -> None:
        for name in self.agent.loaded():
            assert self.server.unload(name).status_code == 200
        for folder in self.agent.disk.folder.iterdir():
            self.agent.disk.delete(folder.name)

    def kill(self) -> None:
        """Ends everything, as when the container's first process ends."""
        kill_at_once(self.server.process.pid)
        self.server.process.wait(10)

    def stop(self) -> None:
        if self.server.process.poll() is None:
            self.server.stop()


@contextlib.contextmanager
def containers(s3: S3Server, count: int, **options: Any) -> Iterator[list[Container]]:
    """Ready containers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # pytest's folders are closed to other users
        started = [Container(Path(folder) / str(i), s3, **options) for i in range(count)]
        try:
            for container in started:
                container.server.wait_until_ready()
            yield started
        finally:
            for container in started:
                container.stop()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(scope="session")
def texts(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each fine-tune by its TargetModel."""
    return publish(s3, tmp_path_factory.mktemp("fine-tunes"), MODELS)
