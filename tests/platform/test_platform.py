"""The server as the container of a SageMaker multi-model endpoint."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from serving.process import file_opener
from tests.e2e.stores import SHORT, error, statistics
from tests.platform.conftest import A_USER, FITTING, IS_ROOT, MODELS, Container
from tests.platform.endpoint import Endpoint
from tests.platform.fine_tunes import invoke, invoke_all
from tests.platform.runtime import client_of
from tests.serving.store.s3 import S3Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(s3: S3Server) -> Iterator[list[Container]]:
    """Two instances that tests share and leave healthy."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # pytest's folders are closed to other users
        started = [Container(Path(folder) / str(i), s3) for i in range(2)]
        try:
            for container in started:
                container.server.wait_until_ready()
            yield started
        finally:
            for container in started:
                container.stop()


def test_thirty_fine_tunes_on_two_instances_with_memory_for_six_answer_as_each_does_alone(
    pair: list[Container], texts: dict[str, str]
) -> None:
    agents = [container.agent for container in pair]
    with client_of(Endpoint("poets", agents)) as client:
        seen = invoke_all(client, "poets", texts, calls=120, clients=8)
    assert seen == {"right": 120}
    for container, agent in zip(pair, agents, strict=True):
        assert agent.ping()
        assert agent.counts["failed unloads"] == 0
        assert agent.counts["no room"] > 0
        assert agent.counts["hits"] > 0
        assert FITTING - 2 < len(agent.loaded()) <= FITTING
        assert len(statistics(container.server)["models"]) == len(agent.loaded())
    # Each was fetched by the instance it was sent to, and never again.
    assert MODELS <= sum(agent.disk.downloads for agent in agents) <= 2 * MODELS


def test_a_replaced_container_gets_its_models_again(
    pair: list[Container], texts: dict[str, str]
) -> None:
    first = pair[0]
    agents = [container.agent for container in pair]
    endpoint = Endpoint("poets", agents)
    some = dict(list(texts.items())[:8])
    with client_of(endpoint) as client, ThreadPoolExecutor(2) as pool:
        assert invoke_all(client, "poets", some, calls=16) == {"right": 16}
        downloads = first.agent.disk.downloads
        going = pool.submit(invoke_all, client, "poets", some, calls=60, clients=4)
        endpoint.take_out(first.agent)
        assert first.server.stop() == 0
        first.replace()
        endpoint.put_back(first.agent)
        assert first.agent.loaded() == []
        assert going.result() == {"right": 60}
        assert invoke_all(client, "poets", some, calls=24, seed=1) == {"right": 24}
    assert first.agent.loaded()
    assert first.agent.disk.downloads == downloads  # its disk was still there


def test_a_container_that_is_killed_comes_back_without_a_wrong_answer(
    pair: list[Container], texts: dict[str, str]
) -> None:
    second = pair[1]
    some = dict(list(texts.items())[8:14])
    with (
        client_of(Endpoint("poets", [container.agent for container in pair])) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        assert invoke_all(client, "poets", some, calls=12) == {"right": 12}
        going = pool.submit(invoke_all, client, "poets", some, calls=80, clients=4)
        second.kill()
        seen = going.result()
        assert seen["wrong"] == 0
        assert seen["right"] >= 70, seen  # those in flight there are lost, the others go elsewhere
        second.replace()
        assert invoke_all(client, "poets", some, calls=24, seed=1) == {"right": 24}


def test_only_the_platform_decides_what_is_loaded(
    pair: list[Container], texts: dict[str, str]
) -> None:
    server, target = pair[0].server, "시/봄-2.tar.gz"
    assert error(server.post("/models/none/invoke", json=SHORT)) == (404, "ModelNotFoundException")
    assert error(server.predict("sowol", SHORT))[0] == 404  # though the store has it
    outside = {"model_name": "x", "url": f"{pair[0].agent.inside}/../../outside"}
    assert error(server.post("/models", json=outside))[0] == 400
    with client_of(Endpoint("poets", [pair[0].agent])) as client:
        assert invoke(client, "poets", target) == texts[target]
    assert target in server.text()  # people know the model by this name
    (engine,) = server.descendants("-m engine ")  # a read-only container can write there
    assert engine.environ()["TMPDIR"] == str(server.run_dir)


@pytest.mark.skipif(not IS_ROOT, reason="only root can start it as the platform does")
def test_of_a_container_that_starts_as_root_one_process_stays_root_to_open_files(
    pair: list[Container], texts: dict[str, str]
) -> None:
    server = pair[0].server
    with client_of(Endpoint("poets", [pair[0].agent])) as client:
        assert invoke(client, "poets", next(iter(texts)))
    processes = [psutil.Process(server.process.pid), *server.descendants()]
    root = [process for process in processes if 0 in process.uids()]
    assert [process.cmdline()[2] for process in root] == [file_opener.__file__]
    for process in {*processes} - {*root}:
        assert set(process.uids()) == {A_USER}
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert set(re.findall(r"^Cap(?:Prm|Eff|Amb):\s*0*(\w+)$", status, re.M)) == {"0"}
        assert re.search(r"^Groups:\s*$", status, re.M)
