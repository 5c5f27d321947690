"""The server as the container of a SageMaker multi-model endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from serving.process import root_files
from tests.e2e.server import eventually
from tests.e2e.stores import LONG, packed, slow, statistics
from tests.platform.agent import Agent
from tests.platform.conftest import A_USER, FITTING, IS_ROOT, MODELS, Container, containers
from tests.platform.endpoint import Endpoint
from tests.platform.fine_tunes import PREFIX, check_container, invoke, invoke_all
from tests.platform.limits import Limits
from tests.platform.runtime import client_of
from tests.serving.store.s3 import S3Server

pytestmark = pytest.mark.slow

SLOW = ("slow-1.tar.gz", "slow-2.tar.gz")
# Two slow models (16.2 each) with two rows of `BUSY` each (11.9 a row), and no more.
BUSY_MIB = "80"
BUSY = {**LONG, "parameters": {**LONG["parameters"], "max_new_tokens": 1500}}


@pytest.fixture(scope="module")
def pair(s3: S3Server) -> Iterator[list[Container]]:
    """Two instances that tests share and leave healthy."""
    with containers(s3, 2) as started:
        yield started


def within_limits(agent: Agent) -> bool:
    """Whether all unloads worked and nothing came near the platform's limits."""
    counts, slowest, limits = agent.seen.counts, agent.seen.slowest, agent.limits
    assert counts["failed unloads"] == 0, counts
    assert slowest["invoke"] < limits.answer_s / 2, slowest
    assert slowest["load"] < limits.load_s / 6, slowest
    assert slowest["unload"] < limits.unload_s / 6, slowest
    return agent.ping()


def test_thirty_fine_tunes_on_two_instances_with_memory_for_six_answer_as_each_does_alone(
    pair: list[Container], texts: dict[str, str]
) -> None:
    agents = [container.agent for container in pair]
    with client_of(Endpoint("poets", agents)) as client:
        seen = invoke_all(client, "poets", texts, calls=120, clients=8)
    assert seen == {"right": 120}
    for container, agent in zip(pair, agents, strict=True):
        assert within_limits(agent)
        assert agent.seen.most_loaded == FITTING
        assert agent.seen.counts["no room"] > 0
        assert agent.seen.counts["hits"] > 0
        assert len(agent.loaded()) <= FITTING
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
        going = pool.submit(invoke_all, client, "poets", some, calls=120, clients=4)
        endpoint.take_out(first.agent)
        assert first.server.stop() == 0
        first.replace()
        endpoint.put_back(first.agent)
        assert first.agent.loaded() == []
        assert going.result() == {"right": 120}
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
        going = pool.submit(invoke_all, client, "poets", some, calls=150, clients=4)
        second.kill()
        seen = going.result()
        assert seen["wrong"] == 0
        assert seen["right"] >= 140, seen  # those in flight there are lost, the others go elsewhere
        second.replace()
        assert invoke_all(client, "poets", some, calls=24, seed=1) == {"right": 24}


def test_lost_models_are_loaded_again_and_a_new_agent_takes_over_loaded_ones(
    pair: list[Container], texts: dict[str, str], s3: S3Server, tmp_path: Path
) -> None:
    before = pair[0].agent
    some = dict(list(texts.items())[:4])
    with client_of(Endpoint("poets", [before])) as client:
        assert invoke_all(client, "poets", some, calls=4) == {"right": 4}
        for name in before.loaded():
            assert pair[0].server.unload(name).status_code == 200
        assert invoke_all(client, "poets", some, calls=4) == {"right": 4}
    assert before.seen.counts["lost"] == 4
    after = check_container(before.url, before.disk.folder, s3, some, before.inside)
    assert after.seen.counts["taken over"] == 4
    assert after.disk.downloads == 0


def test_the_engines_temporary_files_are_where_a_read_only_container_can_write(
    pair: list[Container],
) -> None:
    server = pair[0].server
    (engine,) = server.descendants("-m engine ")
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
    assert [process.cmdline()[2] for process in root] == [root_files.__file__]
    for process in {*processes} - {*root}:
        assert set(process.uids()) == {A_USER}
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert set(re.findall(r"^Cap(?:Prm|Eff|Amb):\s*0*(\w+)$", status, re.M)) == {"0"}
        assert re.search(r"^Groups:\s*$", status, re.M)


def test_errors_reach_the_client_in_the_platforms_form(
    pair: list[Container], texts: dict[str, str], s3: S3Server, tmp_path: Path
) -> None:
    target = next(iter(texts))
    with client_of(Endpoint("poets", [pair[0].agent])) as client:
        with pytest.raises(client.exceptions.ModelError) as caught:
            invoke(client, "poets", target, {"inputs": "가", "parameters": {"온도": 1}})
        assert caught.value.response["OriginalStatusCode"] == 400
        assert "온도" in json.loads(caught.value.response["OriginalMessage"])["message"]
        with pytest.raises(ClientError, match="nothing") as absent:
            invoke(client, "poets", "nothing.tar.gz")
        assert absent.value.response["Error"]["Code"] == "ValidationError"
        with pytest.raises(ClientError, match="not found"):
            invoke(client, "none", target)
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "시.txt").write_text("산에는 꽃 피네", encoding="utf-8")
        s3.put(f"{PREFIX}broken.tar.gz", packed(broken, tmp_path / "broken.tar.gz").read_bytes())
        for _ in range(2):  # the name is free again after a failed load
            with pytest.raises(client.exceptions.ModelError, match="params"):
                invoke(client, "poets", "broken.tar.gz")
        assert invoke(client, "poets", target) == texts[target]


def test_with_the_cache_disabled_a_model_is_unloaded_after_each_call(
    pair: list[Container], texts: dict[str, str]
) -> None:
    some = dict(list(texts.items())[:3])
    with pair[0].afresh(cached=False) as agent, client_of(Endpoint("poets", [agent])) as client:
        assert invoke_all(client, "poets", some, calls=5, clients=1) == {"right": 5}
        assert agent.loaded() == []
        assert statistics(pair[0].server)["weight_bytes"] == 0
        assert agent.disk.bytes() == 0
        assert agent.seen.counts["unloads"] == agent.disk.downloads == 5
        assert invoke_all(client, "poets", some, calls=8, clients=4) == {"right": 8}
        eventually(lambda: agent.disk.bytes() == 0 and agent.loaded() == [])


def test_a_cold_model_is_loaded_though_all_others_are_busy(
    s3: S3Server, texts: dict[str, str], tmp_path: Path
) -> None:
    """Its load gets 507 until a busy model is unloaded, which drains. The client gets
    ModelNotReadyException meanwhile."""
    cold = next(iter(texts))
    for target in SLOW:
        s3.put(PREFIX + target, packed(slow(tmp_path / target[:6]), tmp_path / target).read_bytes())
    with containers(s3, 1, memory_mib=BUSY_MIB) as (container,):
        agent = container.agent
        endpoint = Endpoint("poets", [agent])
        with client_of(endpoint, timeout_s=600) as client, ThreadPoolExecutor(2) as pool:
            for target in SLOW:
                eventually(lambda target=target: ready(client, target), 120)
            agent.limits = Limits(cold_start_s=1.0, answer_s=600.0)
            busy = [pool.submit(invoke, client, "poets", target, BUSY) for target in SLOW]
            eventually(lambda: statistics(container.server)["kv_bytes"] > 30 << 20)
            with pytest.raises(client.exceptions.ModelNotReadyException):
                invoke(client, "poets", cold)
            assert eventually(lambda: ready(client, cold), 300) == texts[cold]
            assert all(future.result() for future in busy)
        assert agent.seen.counts["busy"] == 1
        assert agent.seen.slowest["unload"] > agent.limits.cold_start_s / 2
        assert agent.seen.counts["failed unloads"] == 0
        assert agent.ping()


def ready(client: Any, target: str) -> str | None:
    """The model's text for `SHORT`, None while it is being loaded."""
    try:
        return invoke(client, "poets", target)
    except client.exceptions.ModelNotReadyException:
        return None
