"""A call for a model that is not loaded fetches it, loads it and answers, in one request."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import (
    SHORT,
    SMALL_BYTES,
    error,
    in_flight,
    packed,
    serving,
    slow,
    small,
    statistics,
    text,
)
from tests.e2e.test_metrics import metrics
from tests.serving.store.s3 import BUCKET, S3Server, s3_server

NAMES = [f"m{i}" for i in range(6)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small models, some packed, one below a folder, and a slow one."""
    folder = tmp_path_factory.mktemp("on-demand")
    for seed, name in enumerate(NAMES):
        if seed % 2:
            packed(small(folder / "unpacked" / name, seed), folder / "store" / f"{name}.tar.gz")
        else:
            small(folder / "store" / name, seed)
    packed(small(folder / "unpacked" / "봄", 9), folder / "store" / "시" / "봄.tar.gz")
    small(folder / "store" / "broken").joinpath("kogpt2.params").write_bytes(b"nothing")
    slow(folder / "store" / "slow")
    return folder / "store"


@pytest.fixture(scope="module")
def few(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for two small models."""
    with serving(
        tmp_path_factory.mktemp("few"), store, ENGINE_MEMORY_MIB="4", ENGINE_OVERCOMMIT="1"
    ) as server:
        yield server


@pytest.fixture
def fresh(few: Server) -> Server:
    for name in loaded(few):
        few.unload(name)
    return few


@pytest.fixture(scope="module")
def many(clean: Server, store: Path) -> Server:
    """A server with room for all of them."""
    shutil.copytree(store, clean.store, dirs_exist_ok=True)
    return clean


def loaded(server: Server) -> list[str]:
    answer = requests.get(server.url("/models"), timeout=60).json()
    return [model["modelName"] for model in answer["models"]]


def lines(server: Server, words: str) -> int:
    return server.text().count(words)


@pytest.mark.slow
def test_models_to_preload_are_ready_before_the_server_is(store: Path, tmp_path: Path) -> None:
    with serving(tmp_path, store, PRELOAD_MODELS="m0, m1") as server:
        assert loaded(server) == ["m0", "m1"]
        log = server.text()
    assert log.index("loaded model m1") < log.index('"ready after')


def test_the_first_call_loads_and_answers(many: Server) -> None:
    assert "m2" not in loaded(many)
    first = text(many.predict("m2", SHORT))
    assert "m2" in loaded(many)
    assert text(many.predict("m2", SHORT)) == first
    header = {"X-Amzn-SageMaker-Target-Model": "m3.tar.gz"}
    assert text(requests.post(many.url("/invocations"), json=SHORT, headers=header, timeout=30))
    assert "m3" in loaded(many)


def test_a_name_may_have_folders(many: Server) -> None:
    header = {"X-Amzn-SageMaker-Target-Model": "시/봄.tar.gz".encode()}
    answer = requests.post(many.url("/invocations"), json=SHORT, headers=header, timeout=30)
    assert text(answer) == text(many.predict("시/봄", SHORT))
    assert "시/봄" in loaded(many)


def test_many_clients_of_one_cold_model_load_it_once(many: Server) -> None:
    assert "m4" not in loaded(many)
    with ThreadPoolExecutor(16) as pool:
        texts = {text(a) for a in pool.map(lambda _: many.predict("m4", SHORT), range(16))}
    assert len(texts) == 1
    assert lines(many, "loaded model m4 ") == 1


def test_unknown_and_broken_models_say_so_to_everyone(many: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        unknown = list(pool.map(lambda _: many.predict("없음", SHORT), range(4)))
        broken = list(pool.map(lambda _: many.predict("broken", SHORT), range(4)))
    assert {error(answer) for answer in unknown} == {(404, "ModelNotFoundException")}
    assert {error(answer)[0] for answer in broken} == {400}
    assert all("params" in answer.json()["message"] for answer in broken)
    assert error(many.predict("%2e%2e/store/m0", SHORT))[0] in (400, 404)


def test_what_the_store_offers_is_listed(many: Server) -> None:
    text(many.predict("m0", SHORT))
    answer = requests.get(many.url("/models?available=true"), timeout=60).json()["models"]
    offered = {model["modelName"]: model for model in answer}
    assert {*NAMES, "slow", "시/봄"} <= set(offered)
    assert offered["m0"]["loaded"] is True
    assert offered["slow"]["loaded"] is False
    assert offered["m1"]["sizeBytes"] > 100_000


def test_an_unloaded_model_comes_back_on_demand(many: Server) -> None:
    before = text(many.predict("m0", SHORT))
    assert many.unload("m0").status_code == 200
    assert "m0" not in loaded(many)
    assert text(many.predict("m0", SHORT)) == before


@pytest.mark.slow
def test_the_model_that_was_asked_for_least_makes_room(fresh: Server) -> None:
    for name in ("m0", "m0", "m1", "m2"):
        text(fresh.predict(name, SHORT))
    assert loaded(fresh) == ["m0", "m2"]
    assert len(statistics(fresh)["models"]) == 2
    for name in ("m2", "m2", "m2", "m2", "m3"):
        text(fresh.predict(name, SHORT))
    assert loaded(fresh) == ["m2", "m3"]


@pytest.mark.slow
def test_many_clients_of_a_cold_model_evict_one_model(fresh: Server) -> None:
    for name in ("m0", "m1"):
        text(fresh.predict(name, SHORT))
    evicted = lines(fresh, "is evicted for m2")
    with ThreadPoolExecutor(12) as pool:
        texts = {text(a) for a in pool.map(lambda _: fresh.predict("m2", SHORT), range(12))}
    assert len(texts) == 1
    assert len(loaded(fresh)) == 2
    assert "m2" in loaded(fresh)
    assert lines(fresh, "is evicted for m2") == evicted + 1


def test_more_models_at_once_than_there_is_room_for_are_all_answered(fresh: Server) -> None:
    expected = {name: text(fresh.predict(name, SHORT)) for name in NAMES}
    assert len(set(expected.values())) == len(NAMES)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda name: fresh.predict(name, SHORT), NAMES * 3))
    assert [text(answer) for answer in answers] == [expected[name] for name in NAMES * 3]


def test_a_model_that_can_never_fit_is_507_at_once_and_evicts_nothing(fresh: Server) -> None:
    for name in ("m0", "m1"):
        text(fresh.predict(name, SHORT))
    answer = fresh.predict("slow", SHORT)
    assert error(answer) == (507, "NeverFits")
    assert "4 MiB in all" in answer.json()["message"]
    assert loaded(fresh) == ["m0", "m1"]
    assert "is evicted for slow" not in fresh.text()


def test_an_explicit_load_evicts_nothing_and_says_what_does_not_fit(fresh: Server) -> None:
    answer = fresh.load("slow")
    assert error(answer)[0] == 507
    assert re.search(r"\d+ MiB.* 4 MiB", answer.json()["message"])
    eventually(lambda: not fresh.descendants("model_service_worker"))
    assert fresh.load("a", "m0").status_code == 200
    assert fresh.load("b", "m0").status_code == 200
    assert error(fresh.load("c", "m0"))[0] == 507
    assert loaded(fresh) == ["a", "b"]


def test_loads_and_evictions_and_the_engines_memory_are_measured(fresh: Server) -> None:
    before = metrics(fresh)
    for name in ("m0", "m2", "m4"):
        text(fresh.predict(name, SHORT))
    after = metrics(fresh)

    def more(*key: str) -> float:
        return after[key] - before.get(key, 0)

    assert more("kogpt2_model_load_seconds_count", "m4") == 1
    assert more("kogpt2_model_idle_at_eviction_seconds_count") == 1
    assert more("kogpt2_model_unload_seconds_count") >= 1
    for name in ("m0", "m2", "m4"):  # whatever is evicted again before it is scraped
        assert more("kogpt2_requests_total", name, "200") >= 1
    gone = [name for name in ("m0", "m2") if ("kogpt2_model_steps_total", name) not in after]
    assert len(gone) == 1  # which of them took longer to load stays
    assert more("kogpt2_cache_requests_total", "true") >= 3  # folders are used in place
    assert after[("kogpt2_engine_up",)] == 1
    assert after[("kogpt2_models",)] == 2
    assert after[("kogpt2_engine_budget_bytes",)] == 4 << 20
    assert after[("kogpt2_engine_weight_bytes",)] == 2 * SMALL_BYTES
    assert after["kogpt2_model_steps_total", "m4"] > 0


def test_no_worker_is_started_before_there_is_room(fresh: Server) -> None:
    def socket_number(name: str) -> int:
        """Multi Model Server counts the workers that it starts."""
        described = requests.get(fresh.url(f"/models/{name}"), timeout=60).json()
        return int(described["workers"][0]["id"].partition("-")[0])

    for name in ("m0", "m1"):
        text(fresh.predict(name, SHORT))
    before = socket_number("m1")
    text(fresh.predict("m2", SHORT))
    assert socket_number("m2") == before + 1


@pytest.mark.slow
def test_a_model_with_requests_in_flight_stays_while_an_idle_one_goes(
    store: Path, tmp_path: Path
) -> None:
    # `slow`, `m0` and what LONG needs take 65.2 MiB; `m1` needs 1.7.
    with serving(tmp_path, store, ENGINE_MEMORY_MIB="66", ENGINE_OVERCOMMIT="1") as server:
        text(server.predict("slow", SHORT))
        text(server.predict("m0", SHORT))
        with in_flight(server, "slow", 1) as busy:
            text(server.predict("m0", SHORT))  # used after the other, but idle
            text(server.predict("m1", SHORT))
            assert loaded(server) == ["m1", "slow"]
            assert busy[0].result().status_code == 200
        assert lines(server, "model m0 is evicted for m1") == 1


def test_a_cold_model_gets_in_although_all_others_are_busy(fresh: Server) -> None:
    stop = threading.Event()

    def keep_busy(name: str) -> set[int]:
        statuses = set()
        while not stop.is_set():
            statuses.add(fresh.predict(name, SHORT).status_code)
        return statuses

    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(keep_busy, name) for name in ("m0", "m1") * 4]
        try:
            eventually(lambda: loaded(fresh) == ["m0", "m1"])
            text(fresh.predict("m2", SHORT))
        finally:
            stop.set()
        assert [b.result() for b in busy] == [{200}] * 8


@pytest.mark.slow
def test_unloading_under_load_fails_nobody(many: Server) -> None:
    text(many.predict("slow", SHORT))
    with in_flight(many, "slow", 1) as answers:
        assert many.unload("slow").status_code == 200
        assert {answer.result().status_code for answer in answers} == {200}
    assert text(many.predict("slow", SHORT))  # and comes back when it is wanted


# From S3


@pytest.fixture(scope="module")
def s3(store: Path) -> Iterator[S3Server]:
    with s3_server() as running_s3:
        for path in store.rglob("*.tar.gz"):
            running_s3.put(f"prefix/{path.relative_to(store)}", path.read_bytes())
        for path in [p for p in (store / "m0").iterdir() if p.is_file()]:
            running_s3.put(f"prefix/m0/{path.name}", path.read_bytes())
        running_s3.put("elsewhere/m9.tar.gz", b"x")
        yield running_s3


@pytest.fixture(scope="module")
def from_s3(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {**s3.environment, "MODEL_STORE": f"s3://{BUCKET}/prefix/"}
    with serving(tmp_path_factory.mktemp("s3"), None, **environment) as server:
        yield server


@pytest.mark.slow
def test_models_come_from_s3(from_s3: Server, many: Server) -> None:
    assert loaded(from_s3) == []
    for name in ("m0", "m1", "시/봄"):  # a folder, archives
        assert text(from_s3.predict(name, SHORT)) == text(many.predict(name, SHORT))
    assert loaded(from_s3) == ["m0", "m1", "시/봄"]
    answer = requests.get(from_s3.url("/models?available=true"), timeout=60).json()["models"]
    assert {"m0", "m1", "m3", "시/봄"} <= {model["modelName"] for model in answer}


@pytest.mark.slow
def test_a_model_can_be_loaded_by_its_s3_url(from_s3: Server) -> None:
    answer = from_s3.load("mine", f"s3://{BUCKET}/prefix/m3.tar.gz")
    assert answer.status_code == 200
    assert text(from_s3.predict("mine", SHORT))
    outside = from_s3.load("other", f"s3://{BUCKET}/elsewhere/m9.tar.gz")
    assert error(outside)[0] == 400
    assert error(from_s3.predict("nothing", SHORT)) == (404, "ModelNotFoundException")


@pytest.mark.slow
def test_many_clients_of_a_cold_model_in_s3_fetch_it_once(from_s3: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = {text(a) for a in pool.map(lambda _: from_s3.predict("m5", SHORT), range(8))}
    assert len(texts) == 1
    assert lines(from_s3, "prefix/m5.tar.gz: ") == 1  # the cache says what it fetched


@pytest.mark.slow
def test_a_store_that_is_away_is_503_and_what_is_loaded_works(store: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as running_s3:
        s3 = running_s3.enter_context(s3_server())
        s3.put("m1.tar.gz", (store / "m1.tar.gz").read_bytes())
        environment = {**s3.environment, "MODEL_STORE": f"s3://{BUCKET}"}
        with serving(tmp_path, None, **environment, AWS_MAX_ATTEMPTS="1") as server:
            before = text(server.predict("m1", SHORT))
            running_s3.close()
            assert error(server.predict("m3", SHORT))[0] == 503
            assert text(server.predict("m1", SHORT)) == before
