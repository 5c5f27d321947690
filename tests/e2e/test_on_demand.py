"""A call for a model that is not loaded fetches it, loads it and answers, in one request."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import Server, eventually
from tests.e2e.stores import (
    SHORT,
    SMALL_BYTES,
    error,
    fine_tuned,
    packed,
    serving,
    slow,
    small,
    text,
)
from tests.e2e.test_metrics import metrics
from tests.engine.adapters import make_adapter
from tests.serving.store.file_host import FileHandler, FileHost, running
from tests.serving.store.s3 import BUCKET, S3Server, s3_server

NAMES = [f"m{i}" for i in range(6)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small models, some packed, one below a folder, a slow one, an adapter, a fine-tune."""
    folder = tmp_path_factory.mktemp("on-demand")
    for seed, name in enumerate(NAMES):
        if seed % 2:
            packed(small(folder / "unpacked" / name, seed), folder / "store" / f"{name}.tar.gz")
        else:
            small(folder / "store" / name, seed)
    packed(small(folder / "unpacked" / "봄", 9), folder / "store" / "시" / "봄.tar.gz")
    small(folder / "store" / "broken").joinpath("kogpt2.params").write_bytes(b"nothing")
    slow(folder / "store" / "slow")
    base = small(folder / "store" / "바탕", 3)
    adapter = make_adapter(folder / "unpacked" / "어댑터", base)
    packed(adapter, folder / "store" / "어댑터.tar.gz")
    tuned = fine_tuned(folder / "unpacked" / "파인튜닝", base, "/home/me/바탕")
    packed(tuned, folder / "store" / "파인튜닝.tar.gz")
    fine_tuned(folder / "store" / "베이스가-망가진", base, "broken")
    aliases = json.dumps({"별칭": {"m0": 3, "m2": 1}})
    (folder / "store" / "aliases.json").write_text(aliases, encoding="utf-8")
    return folder / "store"


SIGNATURE = "X-Amz-Signature=0123456789abcdef"


class Bucket(FileHost):
    """Gives `archive` to whoever has the signature, while `is_open`."""

    archive = b""
    is_open = True


class Handler(FileHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Bucket)
        allowed = self.server.is_open and self.path.endswith(f"?{SIGNATURE}")
        self.send(200 if allowed else 403, self.server.archive if allowed else b"")


@pytest.fixture(scope="module")
def bucket(store: Path) -> Iterator[Bucket]:
    bucket = Bucket(("127.0.0.1", 0), Handler)
    bucket.archive = (store / "m1.tar.gz").read_bytes()
    with running(bucket):
        yield bucket


@pytest.fixture(scope="module")
def few(store: Path, bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for two small models, which has loaded what an alias stands for."""
    settings = {"ENGINE_MEMORY_MIB": "4", "ENGINE_OVERCOMMIT": "1", "PRELOAD_MODELS": "별칭,없음"}
    settings["HTTPS_HOSTS"] = f"127.0.0.1:{bucket.server_port}"
    with serving(tmp_path_factory.mktemp("few"), store, **settings) as server:
        yield server


def test_models_are_preloaded_before_the_server_is_ready_and_one_that_cannot_be_is_told(
    few: Server,
) -> None:
    assert few.loaded() == ["m0", "m2"]
    before, ready, _ = few.text().partition('"ready after')
    assert ready
    for said in ("loaded model m0 ", "loaded model m2 ", "model 없음 is not preloaded"):
        assert said in before


@pytest.fixture
def fresh(few: Server) -> Server:
    for name in few.loaded():
        few.unload(name)
    return few


@pytest.fixture(scope="module")
def many(clean: Server, store: Path) -> Server:
    """A server with room for all of them."""
    shutil.copytree(store, clean.store, dirs_exist_ok=True)
    return clean


@pytest.mark.parametrize("name", ["m2", "m3", "시/봄"])
def test_the_first_call_loads_and_answers_also_after_an_unload(many: Server, name: str) -> None:
    assert name not in many.loaded()
    first = text(many.predict(name, SHORT))
    assert name in many.loaded()
    assert many.unload(name).status_code == 200
    assert name not in many.loaded()
    header = {"X-Amzn-SageMaker-Target-Model": f"{name}.tar.gz".encode()}
    assert text(many.post("/invocations", json=SHORT, headers=header)) == first
    assert name in many.loaded()


def test_many_clients_of_one_cold_model_load_it_once(many: Server) -> None:
    assert "m4" not in many.loaded()
    with ThreadPoolExecutor(16) as pool:
        texts = {text(a) for a in pool.map(lambda _: many.predict("m4", SHORT), range(16))}
    assert len(texts) == 1
    assert many.text().count("loaded model m4 ") == 1


def test_unknown_and_broken_models_say_so(many: Server) -> None:
    assert error(many.predict("없음", SHORT)) == (404, "ModelNotFoundException")
    broken = many.predict("broken", SHORT)
    assert error(broken)[0] == 400
    assert "params" in broken.json()["message"]
    assert error(many.predict("%2e%2e/store/m0", SHORT))[0] in (400, 404)


def test_what_the_store_offers_is_listed(many: Server) -> None:
    text(many.predict("m0", SHORT))
    answer = many.get("/models?available=true").json()["models"]
    offered = {model["modelName"]: model for model in answer}
    assert {*NAMES, "slow", "시/봄"} <= set(offered)
    assert offered["m0"]["loaded"] is True
    assert offered["slow"]["loaded"] is False
    assert offered["m1"]["sizeBytes"] > 100_000


def test_a_model_that_can_never_fit_is_507_at_once_and_evicts_nothing(fresh: Server) -> None:
    for name in ("m0", "m1"):
        text(fresh.predict(name, SHORT))
    for answer in (fresh.predict("slow", SHORT), fresh.load("slow")):
        assert error(answer) == (507, "NeverFits")
        assert re.search(r"\d+ MiB.* 4 MiB in all", answer.json()["message"])
    assert error(fresh.load("c", "m0"))[0] == 507  # an explicit load evicts nothing
    assert fresh.loaded() == ["m0", "m1"]
    assert "is evicted for" not in fresh.text()


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


# From a pre-signed url: what signs it is nowhere but in the gateway's memory


def written(server: Server) -> list[Path]:
    """The files of the server that have the signature in them."""
    found = []
    for path in (*server.run_dir.rglob("*"), server.log):
        with contextlib.suppress(FileNotFoundError):  # the server removes what MMS leaves
            if path.is_file() and SIGNATURE.encode() in path.read_bytes():
                found.append(path)
    return found


@pytest.mark.slow
def test_a_signature_is_shown_and_written_nowhere_and_the_model_outlives_its_gateway(
    fresh: Server, bucket: Bucket
) -> None:
    url = f"http://127.0.0.1:{bucket.server_port}/시.tar.gz"
    refused = fresh.load("시", f"{url}?X-Amz-Signature=wrong")
    assert refused.status_code == 403
    assert "wrong" not in refused.text
    assert fresh.load("시", f"{url}?{SIGNATURE}").status_code == 200
    before = text(fresh.predict("시", SHORT))
    for path in ("/models", "/models/시"):
        shown = fresh.get(path).text
        assert url in shown
        assert "Signature" not in shown
    assert written(fresh) == []
    bucket.is_open = False
    fresh.kill_gateway()
    assert text(fresh.predict("시", SHORT)) == before
    assert written(fresh) == []


def test_a_fine_tune_whose_base_is_broken_is_served_whole(many: Server) -> None:
    assert text(many.predict("베이스가-망가진", SHORT))
    described = many.get("/models/베이스가-망가진").json()
    assert "baseModel" not in described
    assert described["wholeBecause"]
    assert many.unload("베이스가-망가진").status_code == 200


# From S3


@pytest.fixture(scope="module")
def s3(store: Path) -> Iterator[S3Server]:
    with contextlib.ExitStack() as running:
        s3 = running.enter_context(s3_server())
        s3.stop = running.close  # type: ignore[attr-defined]
        for path in store.rglob("*.tar.gz"):
            s3.put(f"prefix/{path.relative_to(store)}", path.read_bytes())
        for path in [p for p in (store / "m0").iterdir() if p.is_file()]:
            s3.put(f"prefix/m0/{path.name}", path.read_bytes())
        base = packed(store / "바탕", store.parent / "바탕.tar.gz")
        s3.put("prefix/팀/바탕.tar.gz", base.read_bytes())
        s3.put("elsewhere/m9.tar.gz", b"x")
        yield s3


@pytest.fixture(scope="module")
def from_s3(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {**s3.environment, "MODEL_STORE": f"s3://{BUCKET}/prefix/"}
    bases = "바탕=팀/바탕,*/바탕=팀/바탕"
    environment |= {"AWS_MAX_ATTEMPTS": "1", "MODEL_BASES": bases}
    with serving(tmp_path_factory.mktemp("s3"), None, **environment) as server:
        yield server


@pytest.mark.slow
def test_models_come_from_s3(from_s3: Server, many: Server) -> None:
    assert from_s3.loaded() == []
    for name in ("m0", "m1", "시/봄", "어댑터"):  # a folder, archives, one with its base
        assert text(from_s3.predict(name, SHORT)) == text(many.predict(name, SHORT))
    models = from_s3.get("/models").json()["models"]
    bases = {model["modelName"]: model.get("baseModel") for model in models}
    assert bases == {**dict.fromkeys(("m0", "m1", "시/봄")), "어댑터": "팀/바탕"}
    for server, base in ((from_s3, "팀/바탕"), (many, "바탕")):
        assert text(server.predict("파인튜닝", SHORT))
        assert server.get("/models/파인튜닝").json()["baseModel"] == base
        assert server.unload("파인튜닝").status_code == 200
    answer = from_s3.get("/models?available=true").json()["models"]
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
def test_a_changed_file_of_aliases_in_s3_is_read(from_s3: Server, s3: S3Server) -> None:
    for model in ("m1", "m3"):
        s3.put("prefix/aliases.json", json.dumps({"별칭": model}).encode())
        expected = text(from_s3.predict(model, SHORT))
        eventually(
            lambda expected=expected: from_s3.predict("별칭", SHORT).text.find(expected) >= 0
        )


@pytest.mark.slow
def test_a_store_that_is_away_is_503_and_what_is_loaded_works(
    from_s3: Server, s3: S3Server
) -> None:
    before = text(from_s3.predict("m1", SHORT))
    s3.stop()  # type: ignore[attr-defined]
    assert error(from_s3.predict("m5", SHORT))[0] == 503
    assert text(from_s3.predict("m1", SHORT)) == before
