"""The workers' client: a handle outlives the engine's process, and never waits for ever."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import (
    ArtifactError,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
)
from engine.http.client import EngineClient, ModelHandle
from engine.http.leases import GRACE_S
from tests.engine.engines import EngineProcess, engine_process
from tests.processes import eventually

NAME = "시/소월 #1?"
PROMPT = "오늘은 날씨가"
FEW = {"max_new_tokens": 5}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The last test ends it."""
    fast = {"ENGINE_BACKEND": "native", "ENGINE_PRECISION": "fp32"}
    with engine_process(tmp_path_factory.mktemp("client"), **fast) as found:
        yield found


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[EngineClient]:
    made = EngineClient(str(engine.socket))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may take its time to come back."""
    monkeypatch.setattr("engine.http.client.RECONNECT_S", 60.0)


@pytest.fixture
def handle(client: EngineClient, model_dir: Path) -> Iterator[ModelHandle]:
    made = ModelHandle(client, NAME, str(model_dir))
    yield made
    made.close()


def text(handle: ModelHandle, **options: float) -> str:
    return str(handle.generate(PROMPT, FEW, **options)["completions"][0]["text"])


def texts_at_once(handle: ModelHandle, count: int, ready: Any = lambda: None) -> list[str]:
    """The texts of requests from so many threads, each with its connection."""
    together = threading.Barrier(count)

    def ask(_: int) -> str:
        together.wait(60)
        try:
            return text(handle)
        finally:
            handle._client.close()

    with ThreadPoolExecutor(count) as pool:
        found = pool.map(ask, range(count))
        ready()
        return list(found)


def test_a_handle_loads_its_model_and_generates(handle: ModelHandle, model_dir: Path) -> None:
    assert (handle.model["name"], handle.model["model_dir"]) == (NAME, str(model_dir))
    answer = handle.generate(PROMPT, {"max_new_tokens": 7, "seed": 1, "num_return_sequences": 2})
    assert [c["tokens"] for c in answer["completions"]] == [7, 7]
    assert texts_at_once(handle, 8) == [text(handle)] * 8


def test_the_errors_of_the_engine_are_raised_as_they_were_there(
    client: EngineClient, handle: ModelHandle, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=r"parameters\.온도"):
        handle.generate(PROMPT, {"온도": 1})
    with pytest.raises(PromptTooLong):
        handle.generate("물 " * 5000, {})
    with pytest.raises(DeadlineExceeded):
        handle.generate(PROMPT, {"max_new_tokens": 100_000}, timeout_s=0.2)
    with pytest.raises(ModelNotFound):
        client.request("DELETE", "/models/none")
    with pytest.raises(ArtifactError, match=r"\*\.params"):
        ModelHandle(client, "empty", str(tmp_path))


def test_a_connection_is_used_again(client: EngineClient) -> None:
    client.request("GET", "/health")
    first = client._local.connection.socket
    client.request("GET", "/health")
    assert client._local.connection.socket is first


def test_a_closed_handle_ends_its_requests_and_gives_its_model_back(
    engine: EngineProcess, client: EngineClient, model_dir: Path
) -> None:
    handle = ModelHandle(client, "given up", str(model_dir))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(handle.generate, PROMPT, {"max_new_tokens": 100_000})
        eventually(lambda: (engine.statistics("given up") or {})["running"] == 1)
        handle.close()
        assert isinstance(answer.exception(30), ModelNotFound)
    eventually(lambda: (engine.statistics("given up") or {"running": 0})["running"] == 0)
    eventually(lambda: not engine.statistics("given up"), seconds=GRACE_S + 20)


def test_a_model_that_was_unloaded_is_loaded_again(
    engine: EngineProcess, client: EngineClient, handle: ModelHandle
) -> None:
    before = text(handle)
    client.request("DELETE", "/models/%EC%8B%9C%2F%EC%86%8C%EC%9B%94%20%231%3F")
    assert not engine.statistics(NAME)
    assert text(handle) == before


def test_an_engine_that_hangs_is_unavailable(engine: EngineProcess, client: EngineClient) -> None:
    client.request("GET", "/health")
    engine.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(EngineUnavailable, match="did not answer within"):
            client.request("GET", "/health", timeout_s=0.5)
    finally:
        engine.process.send_signal(signal.SIGCONT)
    assert client.request("GET", "/health")["status"] == "ok"


def test_requests_are_sent_again_once_the_engine_is_back_or_fail_in_time(
    engine: EngineProcess, client: EngineClient, handle: ModelHandle, model_dir: Path
) -> None:
    before = text(handle)
    long = {"max_new_tokens": 3000}
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(handle.generate, PROMPT, long, timeout_s=120)
        pool.submit(handle._client.close)
        eventually(lambda: engine.statistics(NAME)["running"] == 1)
        engine.kill()
        assert texts_at_once(handle, 4, lambda: engine.start(wait=False)) == [before] * 4
        assert lost.result(120)["completions"][0]["tokens"] == 3000
    assert engine.statistics(NAME)["requests"] == 5
    # This thread's connection was closed while it was idle: it is opened again.
    assert client.request("GET", "/health")["status"] == "ok"
    engine.kill()
    started = time.monotonic()
    with pytest.raises(EngineUnavailable) as caught:
        text(handle, timeout_s=1.5)
    assert time.monotonic() - started > 1.4
    assert caught.value.retry_after_s == 1
    with pytest.raises(EngineUnavailable):
        client.request("GET", "/health")
    with pytest.raises(EngineUnavailable):
        ModelHandle(client, "other", str(model_dir))
    assert time.monotonic() - started < 40  # others wait for it for a minute
