"""Whole fine-tunes of one base are models of their own to every client, and share its weights and
steps. Which model is the base: tests/serving/models/test_bases.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.stores import SHORT, fine_tuned, serving, small, statistics, text
from tests.scripts import command

pytestmark = pytest.mark.slow

BASE, TUNED = "바탕", tuple(f"파인튜닝-{i}" for i in range(8))
OTHER, LATER = "남의-모델", "나중"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A base, eight fine-tunes of it, and a model that only says that it is one."""
    store = tmp_path_factory.mktemp("deltas")
    base = small(store / BASE, 3)
    for seed, name in enumerate(TUNED):
        fine_tuned(store / name, base, f"/home/me/{BASE}", seed)
    fine_tuned(store / OTHER, small(store / "다른", 4), BASE)
    with serving(tmp_path_factory.mktemp("run"), store, ENGINE_PRECISION="int8") as server:
        yield server


@pytest.fixture(scope="module")
def texts(server: Server) -> dict[str, str]:
    """The text of each fine-tune while no other is loaded."""
    found = {}
    for name in TUNED:
        found[name] = text(server.predict(name, SHORT))
        assert server.unload(name).status_code == 200
    return found


def bases(server: Server) -> dict[str, str | None]:
    models = server.get("/models").json()["models"]
    return {model["modelName"]: model.get("baseModel") for model in models}


def test_eight_clients_of_eight_fine_tunes_get_the_texts_that_each_has_alone(
    server: Server, texts: dict[str, str]
) -> None:
    assert text(server.predict(BASE, SHORT))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            answers = pool.map(lambda name: text(server.predict(name, SHORT)), TUNED)
            assert dict(zip(TUNED, answers, strict=True)) == texts
    assert bases(server) == {BASE: None, **dict.fromkeys(TUNED, BASE)}
    with server.get("/console/events", stream=True) as events:
        first = next(line for line in events.iter_lines() if line.startswith(b"data: "))
    row = json.loads(first.removeprefix(b"data: "))["models"][TUNED[0]]
    assert (row["base"], row["is_adapter"], row["whole_because"]) == (BASE, False, "")


def test_a_model_that_is_no_fine_tune_of_the_base_that_it_names_is_whole(server: Server) -> None:
    assert text(server.predict(OTHER, SHORT))
    described = server.get(f"/models/{OTHER}").json()
    assert "baseModel" not in described
    assert "too far from its base" in described["wholeBecause"]
    assert server.unload(OTHER).status_code == 200


def test_a_base_is_unloaded_and_replaced_while_its_fine_tunes_answer(
    server: Server, texts: dict[str, str]
) -> None:
    assert text(server.predict(BASE, SHORT))
    assert server.unload(BASE).status_code == 200
    name, store = TUNED[0], server.store
    shutil.copytree(store / BASE, store / LATER)
    assert text(server.predict(name, SHORT)) == texts[name]
    (store / BASE).rename(store.parent / "alt")
    try:
        assert text(server.predict(name, SHORT)) == texts[name]
        assert server.unload(name).status_code == 200
        assert text(server.predict(name, SHORT))  # whole
        described = server.get(f"/models/{name}").json()
        assert described["wholeBecause"] == "its base is not in the store"
        assert server.unload(name).status_code == 200
        answer = server.load(name, base=LATER)
        assert answer.status_code == 200, answer.text
        assert bases(server)[name] == LATER
        assert text(server.predict(name, SHORT)) == texts[name]
    finally:
        (store.parent / "alt").rename(store / BASE)
        server.unload(name)
        eventually(lambda: server.load(BASE).status_code == 200)  # a missing name is cached
        server.unload(BASE)


def test_a_fine_tune_that_sagemaker_brings_has_a_base_of_the_store(
    server: Server, texts: dict[str, str], tmp_path: Path
) -> None:
    """Under names of SageMaker's, so only `base` or a pattern of all names leads to it."""
    named, other = (tmp_path / "ml" / "models" / f"{i}f4dcc3b5aa765d6" / "model" for i in (5, 6))
    for folder, name in ((named, TUNED[2]), (other, TUNED[3])):
        shutil.copytree(server.store / name, folder)
        (folder / "config.json").write_bytes((server.store / BASE / "config.json").read_bytes())
    settings = {"precision": "int8", "base": BASE}
    (named / "serving.json").write_text(json.dumps(settings), encoding="utf-8")
    mode = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}
    mode |= {"ENGINE_PRECISION": "int8", "MODEL_BASES": f"*={BASE}"}
    with serving(tmp_path / "run", server.store, **mode) as endpoint:
        for folder, name in ((named, TUNED[2]), (other, TUNED[3])):
            model = folder.parent.name
            answer = endpoint.load(model, str(folder))
            assert answer.status_code == 200, answer.text
            answer = endpoint.post(f"/models/{model}/invoke", json=SHORT)
            assert text(answer) == texts[name]
            assert bases(endpoint)[model] == BASE


def test_fine_tunes_outlive_the_gateway_and_the_engine(
    server: Server, texts: dict[str, str]
) -> None:
    name = TUNED[1]
    assert text(server.predict(name, SHORT)) == texts[name]
    server.kill_gateway()
    assert text(server.predict(name, SHORT)) == texts[name]
    assert bases(server)[name] == BASE
    server.descendants("-m engine ")[0].kill()
    eventually(lambda: "the engine was killed by SIGKILL" in server.text())
    eventually(lambda: server.predict(name, SHORT).status_code == 200)
    assert text(server.predict(name, SHORT)) == texts[name]
    (model,) = (m for m in statistics(server)["models"] if m["name"].startswith(f"{name}#"))
    assert model["base"].endswith(BASE)
    (server.store / BASE).rename(server.store.parent / "옛것")
    try:
        server.forget_log()
        server.descendants("-m engine ")[0].kill()
        eventually(lambda: server.predict(name, SHORT).status_code == 200)
        reason = "its base: there is no such model folder"
        eventually(lambda: server.get(f"/models/{name}").json().get("wholeBecause") == reason)
        assert bases(server)[name] is None
    finally:
        (server.store.parent / "옛것").rename(server.store / BASE)
        server.unload(name)


def test_a_delta_in_place_of_weights_is_a_model_that_needs_its_base(
    server: Server, texts: dict[str, str]
) -> None:
    """Made by the command, listed and loaded by its name, and after a new gateway still there."""
    name, source, store = "델타-봄", server.store / TUNED[4], server.store
    options = (source, store / name, "--to", "delta", "--base", store / BASE)
    command.output(command.run("convert", *options))
    (store / name / "serving.json").unlink()
    try:
        listed = {m["modelName"]: m for m in server.get("/models?available=true").json()["models"]}
        assert listed[name]["sizeBytes"] < listed[TUNED[4]]["sizeBytes"] / 2
        assert text(server.predict(name, SHORT)) == texts[TUNED[4]]
        assert bases(server)[name] == BASE
        server.kill_gateway()
        assert text(server.predict(name, SHORT)) == texts[TUNED[4]]
        assert server.unload(name).status_code == 200
        for settings, message in (
            ({"base": OTHER}, "was not made with this base"),
            ({"precision": "fp32"}, "a delta needs int8 on a CPU"),
            ({"share": False}, "cannot be served without its base"),
            ({"base": "없음"}, "없음"),
        ):
            answer = server.load(name, **settings)
            assert (answer.status_code, message in answer.text) == (400, True), answer.text
        assert name not in bases(server)
    finally:
        server.unload(name)
        shutil.rmtree(store / name)
