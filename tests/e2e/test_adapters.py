"""Adapters (LoRA) are models of their own to every client, and share the base of the store. From
S3: test_on_demand.py."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, error, packed, small, statistics, text
from tests.engine.adapters import make_adapter, merged

pytestmark = pytest.mark.slow

ADAPTERS = tuple(f"어댑터-{i}" for i in range(8))


@pytest.fixture(scope="module")
def store(clean: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, eight adapters of it, half of them packed, and what each is as a whole model."""
    store, unpacked = clean.store, tmp_path_factory.mktemp("adapters")
    base = small(store / "바탕", 3)
    for seed, name in enumerate(ADAPTERS):
        where = unpacked / name if seed % 2 else store / name
        adapter = make_adapter(where, base, seed=seed, rank=1 + 2 * seed)
        merged(store / f"전체-{seed}", base, adapter)
        if seed % 2:
            packed(adapter, store / f"{name}.tar.gz")
    return store


@pytest.fixture(scope="module")
def server(clean: Server, store: Path) -> Server:
    return clean


@pytest.fixture(scope="module")
def texts(server: Server) -> dict[str, str]:
    """The text of each adapter as a whole model."""
    found = {}
    for seed, name in enumerate(ADAPTERS):
        found[name] = text(server.predict(f"전체-{seed}", SHORT))
        assert server.unload(f"전체-{seed}").status_code == 200
    assert len(set(found.values())) == len(ADAPTERS)
    return found


def listed(server: Server) -> dict[str, str | None]:
    models = server.get("/models").json()["models"]
    return {model["modelName"]: model.get("baseModel") for model in models}


def test_eight_clients_of_eight_adapters_get_the_texts_of_whole_models(
    server: Server, texts: dict[str, str]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            answers = pool.map(lambda name: text(server.predict(name, SHORT)), ADAPTERS)
            assert dict(zip(ADAPTERS, answers, strict=True)) == texts
    assert listed(server) == dict.fromkeys(ADAPTERS, "바탕")
    models = statistics(server)["models"]
    assert len({model["base"] for model in models}) == 1


def test_openais_routes_and_settings_are_those_of_any_model(
    server: Server, texts: dict[str, str]
) -> None:
    name = ADAPTERS[2]
    body = {"model": name, "prompt": SHORT["inputs"], "max_tokens": 16, "temperature": 0}
    answer = server.post("/v1/completions", json=body).json()
    assert answer["model"] == name
    assert answer["choices"][0]["text"]
    served = server.get("/v1/models").json()["data"]
    assert set(ADAPTERS) <= {model["id"] for model in served}
    metadata = server.get(f"/v2/models/{name}").json()
    assert metadata["name"] == name
    described = server.get(f"/models/{name}").json()
    assert described["baseModel"] == "바탕"
    with server.get("/console/events", stream=True) as events:
        first = next(line for line in events.iter_lines() if line.startswith(b"data: "))
    assert json.loads(first.removeprefix(b"data: "))["models"][name]["base"] == "바탕"


def test_an_adapter_is_loaded_for_the_base_that_a_request_names(server: Server) -> None:
    answer = server.load("새", ADAPTERS[0], base="전체-0")
    assert answer.status_code == 200, answer.text
    assert listed(server)["새"] == "전체-0"
    assert server.unload("새").status_code == 200


def sharing(server: Server, name: str) -> tuple[str | None, str | None]:
    """A model's base, and why it shares none, as the gateway and the engine have them."""
    described = server.get(f"/models/{name}").json()
    base, reason = described.get("baseModel"), described.get("wholeBecause")
    (in_engine,) = (m for m in statistics(server)["models"] if m["name"].startswith(f"{name}#"))
    if "base" in in_engine or "whole_because" in in_engine:
        assert (base is None) == ("base" not in in_engine)
        assert reason == in_engine.get("whole_because")
    return base, reason


def test_a_whole_fine_tune_is_loaded_with_the_base_that_a_request_names(server: Server) -> None:
    for settings, reason in (
        ({"base": "바탕"}, "it is not computed in int8 on a CPU"),
        ({"base": "바탕", "precision": "int8"}, None),
        ({"base": "바탕", "precision": "int8", "share": False}, None),
        ({"precision": "int8"}, None),
    ):
        answer = server.load("새", "전체-0", **settings)
        assert answer.status_code == 200, answer.text
        assert text(server.predict("새", SHORT))
        base, whole_because = sharing(server, "새")
        if "share" in settings or "base" not in settings:
            assert (base, whole_because) == (None, None)
        elif reason is None:
            assert (base, whole_because) == ("바탕", None)
        else:
            assert (base, whole_because) == (None, reason)
        assert server.get("/models/새").json()["settings"] == settings
        assert server.delete("/adapters/새", management=True).status_code == 404
        assert server.unload("새").status_code == 200
    for base, message in (("없음", "base is '없음'"), ("전체-0", "the model itself")):
        refused = server.load("새", "전체-0", base=base, precision="int8")
        assert error(refused)[0] == 400
        assert message in refused.json()["message"]
    refused = server.load("새", ADAPTERS[0], share=False)
    assert error(refused)[0] == 400
    assert "새" not in listed(server)


def test_adapters_outlive_the_gateway_and_the_engine(server: Server, texts: dict[str, str]) -> None:
    name = ADAPTERS[1]
    assert text(server.predict(name, SHORT)) == texts[name]
    server.kill_gateway()
    assert text(server.predict(name, SHORT)) == texts[name]
    server.descendants("-m engine ")[0].kill()
    eventually(lambda: "the engine was killed by SIGKILL" in server.text())
    eventually(lambda: server.predict(name, SHORT).status_code == 200)
    assert text(server.predict(name, SHORT)) == texts[name]
    assert listed(server)[name] == "바탕"
