"""What KServe's and Seldon Core's agents ask of a server, in their order, over HTTP and gRPC.

Read in KServe 0.20 (pkg/agent: puller, downloader, watcher) and in Seldon Core 2.10
(scheduler/pkg/agent: agent_svc_manager, repository/triton, modelserver_controlplane/oip).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import tritonclient.grpc as triton

from tests.e2e.server import Server
from tests.e2e.stores import SHORT, small, text
from tests.e2e.test_triton import generated, prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    """Beside an agent, which puts models into its folder."""
    return clean


# KServe: a TrainedModel comes, changes and goes


def managed(server: Server, name: str, action: str) -> requests.Response:
    return server.post(f"/v2/repository/models/{name}/{action}", json={})


def states(server: Server) -> dict[str, str]:
    answer = server.post("/v2/repository/index", json={})
    return {entry["name"]: entry["state"] for entry in answer.json()}


def brought(server: Server, name: str, seed: int) -> None:
    """A model as the agent's downloader leaves it, with the mark that it is complete."""
    folder = small(server.store / name, seed)
    (folder / f"SUCCESS.{seed:064x}").write_text('{"storageUri": "s3://b/시"}', "utf-8")


def said(server: Server, name: str) -> str:
    body = {"text_input": "나는 오늘", "max_tokens": 16}
    answer = server.post(f"/v2/models/{name}/generate", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text_output"])


def test_kserves_agent_brings_changes_and_takes_a_model(server: Server) -> None:
    assert server.get("/v2/health/ready").status_code == 200
    brought(server, "spring", 1)
    assert managed(server, "spring", "load").status_code == 200
    assert states(server)["spring"] == "READY"
    assert server.get("/v2/models/spring/ready").status_code == 200
    first = said(server, "spring")

    # Its spec has changed: it is removed and added, the files always before the call.
    shutil.rmtree(server.store / "spring")
    assert managed(server, "spring", "unload").status_code == 200
    brought(server, "spring", 2)
    assert managed(server, "spring", "load").status_code == 200
    assert said(server, "spring") != first

    shutil.rmtree(server.store / "spring")
    assert managed(server, "spring", "unload").status_code == 200
    assert "spring" not in states(server)
    assert server.get("/v2/models/spring/ready").status_code == 404


# Seldon Core 2: its scheduler places, overcommits and evicts


@pytest.fixture
def agent(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


def placed(server: Server, name: str, seed: int) -> str:
    """As the agent's handler for Triton lays a model out: the artifact's files below its one
    version, those that are no folders beside it, too, and a configuration with its name."""
    versioned = f"{name}_{seed}"
    folder = server.store / versioned
    small(folder / "1", seed)
    for file in (folder / "1").iterdir():
        shutil.copy(file, folder)
    (folder / "config.pbtxt").write_text(f'name:"{versioned}"', "utf-8")
    return versioned


def index(agent: Any) -> dict[str, str]:
    return {model.name: model.state for model in agent.get_model_repository_index().models}


def asked(agent: Any, name: str) -> str:
    return generated(agent.infer(name, [prompt()], parameters=SHORT["parameters"]))


def test_seldons_agent_starts_places_and_evicts(server: Server, agent: Any) -> None:
    # It starts: the server lives, and what an agent before it has left goes.
    assert agent.is_server_live()
    old = placed(server, "old", 3)
    agent.load_model(old)
    for name, state in index(agent).items():
        if state in ("READY", "LOADING"):
            agent.unload_model(name)
        shutil.rmtree(server.store / name)
    assert index(agent) == {}

    spring, autumn = placed(server, "spring", 1), placed(server, "autumn", 2)
    agent.load_model(spring)
    agent.load_model(spring)  # after an answer that was lost
    agent.load_model(autumn)
    assert index(agent) == {spring: "READY", autumn: "READY"}
    texts = asked(agent, spring), asked(agent, autumn)
    assert texts[0] != texts[1]
    assert texts[0] == text(server.predict(spring, SHORT))

    # Overcommitted: evicted, its files stay, and it comes back.
    agent.unload_model(spring)
    assert index(agent)[spring] == "UNAVAILABLE"
    agent.load_model(spring)
    assert asked(agent, spring) == texts[0]

    for name in (spring, autumn):
        agent.unload_model(name)
        shutil.rmtree(server.store / name)
    assert index(agent) == {}
