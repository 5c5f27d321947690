"""The engine's process, by requests over its unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.requests import Request

from common.errors import Cancelled, SettingError
from common.settings import read_settings
from engine.engine import Engine
from engine.http import protocol, server
from engine.http.server import EngineApp
from engine.settings import Settings
from tests.engine.conftest import NewEngine
from tests.engine.engines import WAIT_S, EngineProcess, Gate, engine_process
from tests.processes import eventually, python

NAME = "시/소월 #1?.tar.gz"  # of a model: Korean, a slash, a space, what URLs are made of
PROMPT = "오늘은 날씨가"
LONG = {"inputs": PROMPT, "parameters": {"max_new_tokens": 100_000}}  # some seconds' work


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    settings = {"ENGINE_MEMORY_MIB": "32", "ENGINE_OVERCOMMIT": "1", "ENGINE_PRECISION": "fp32"}
    with engine_process(tmp_path_factory.mktemp("server"), **settings) as found:
        yield found


@pytest.fixture
def engine(process: EngineProcess) -> Iterator[EngineProcess]:
    """The engine without models."""
    yield process
    for model in process.call("GET", "/models")[1]["models"]:
        process.call("DELETE", f"/models/{quote(model['name'], safe='')}")


URL = f"/models/{quote(NAME, safe='')}"


@pytest.fixture
def loaded(engine: EngineProcess, model_dir: Path) -> EngineProcess:
    """The engine with a model."""
    body = {"name": NAME, "model_dir": str(model_dir)}
    status, model = engine.call("POST", "/models", body)
    assert (status, model["name"], model["model_dir"]) == (200, NAME, str(model_dir))
    assert (model["backend"], model["precision"]) == ("mxnet", "fp32")
    return engine


def generate(engine: EngineProcess, body: dict[str, Any]) -> tuple[int, Any]:
    return engine.call("POST", f"{URL}/generate", body)


def stream(engine: EngineProcess, body: dict[str, Any]) -> list[Any]:
    response = engine.open("POST", f"{URL}/generate", {**body, "stream": True})
    assert response.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in response]


def test_a_load_can_be_checked_before_it_is_made(engine: EngineProcess, model_dir: Path) -> None:
    body = {"name": "a", "model_dir": str(model_dir)}
    status, room = engine.call("POST", "/room", body)
    assert (status, set(room)) == (200, {"weight_bytes"})
    promised = 32 << 20  # all of the engine's memory, to another load
    answers = [
        engine.call("POST", "/room", {**body, "promised": {"봄": promised + more}})
        for more in (0, 1000)
    ]
    assert [status for status, _ in answers] == [200, 200]
    full, fuller = (answer for _, answer in answers)
    assert full["weight_bytes"] == room["weight_bytes"]
    assert fuller["missing_bytes"] == full["missing_bytes"] + 1000 > 1000
    assert "MiB" in full["message"]
    for wrong in (["봄"], {"봄": "1000"}):
        assert engine.call("POST", "/room", {**body, "promised": wrong})[0] == 400


def test_health_is_that_of_the_step_loop(engine: EngineProcess) -> None:
    status, health = engine.call("GET", "/health")
    assert (status, health["status"], health["thread_alive"]) == (200, "ok", True)
    assert health["step_age_s"] >= 0
    closed = Engine(Settings(memory_mib=1))
    closed.close()
    answer = asyncio.run(EngineApp(closed)._health(Request({"type": "http"})))
    assert (answer.status_code, json.loads(answer.body)["thread_alive"]) == (503, False)


def test_models_are_listed_and_unloaded(loaded: EngineProcess) -> None:
    assert [m["name"] for m in loaded.call("GET", "/models")[1]["models"]] == [NAME]
    assert loaded.call("DELETE", URL) == (204, None)
    assert loaded.call("GET", "/models") == (200, {"models": []})
    assert loaded.call("DELETE", URL)[0] == 404


def test_a_stream_is_one_token_a_line_and_gives_the_whole_text(loaded: EngineProcess) -> None:
    parameters = {"max_new_tokens": 8, "seed": 3, "num_return_sequences": 2}
    body = {"inputs": PROMPT, "parameters": parameters}
    status, whole = generate(loaded, body)
    assert (status, [c["tokens"] for c in whole["completions"]]) == (200, [8, 8])
    assert whole["seconds"] >= whole["time_to_first_token_s"] > 0
    lines = stream(loaded, body)
    assert len(lines) == 16
    for index, completion in enumerate(whole["completions"]):
        mine = [line for line in lines if line["index"] == index]
        assert "".join(line["text"] for line in mine) == completion["text"]
        reasons = [line["finish_reason"] for line in mine if "finish_reason" in line]
        assert reasons == [completion["finish_reason"]] == ["length"]


def test_a_text_and_its_ids_are_continued_alike(loaded: EngineProcess) -> None:
    parameters = {"max_new_tokens": 6, "logprobs": 1}
    _, whole = generate(loaded, {"prompt": PROMPT, "parameters": parameters})
    steps = whole["completions"][0]["logprobs"]
    ids = [step["token"] for step in steps]
    assert ids == [step["top"][0]["token"] for step in steps]
    assert "".join(step["text"] for step in steps) == whole["completions"][0]["text"]
    body = {"prompt": ids, "parameters": {"max_new_tokens": 3}}
    assert stream(loaded, body)[0]["prompt_tokens"] == len(ids)
    assert generate(loaded, body)[1]["prompt_tokens"] == len(ids)


def test_a_text_becomes_ids_and_text_again(loaded: EngineProcess) -> None:
    def post(route: str, **body: Any) -> tuple[int, Any]:
        return loaded.call("POST", f"{URL}/{route}", body)

    given = {"prompt": PROMPT, "parameters": {"decoder_input_details": True}}
    prefill = generate(loaded, given)[1]["completions"][0]["prefill"]
    status, found = post("tokenize", prompt=PROMPT)
    assert status == 200
    assert found["tokens"] == [token["token"] for token in prefill]
    assert found["texts"] == [token["text"] for token in prefill]
    plain = post("tokenize", prompt=PROMPT, special=False)[1]
    assert plain["tokens"] == found["tokens"][1:]
    long = post("tokenize", prompt=PROMPT * 1000)[1]
    assert len(long["tokens"]) > long["max_length"]
    assert post("detokenize", tokens=found["tokens"]) == (200, {"text": f" {PROMPT}"})
    assert post("tokenize", prompt=[1])[0] == post("tokenize", inputs=PROMPT)[0] == 400
    for tokens in (PROMPT, [10**6]):
        assert post("detokenize", tokens=tokens)[0] == 400


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_prompts_tokens_come_back_if_wanted(loaded: EngineProcess, logprobs: int | None) -> None:
    given = {"max_new_tokens": 3, "decoder_input_details": True, "logprobs": logprobs}
    body: dict[str, Any] = {"prompt": PROMPT * 3, "parameters": given}
    _, whole = generate(loaded, body)
    prefill = whole["completions"][0]["prefill"]
    assert len(prefill) == whole["prompt_tokens"]
    assert "".join(token["text"] for token in prefill) == "<s> " + PROMPT * 3
    assert "logprob" not in prefill[0]
    assert [token["token"] for token in prefill if token.get("special")] == [prefill[0]["token"]]
    assert stream(loaded, body)[0]["prefill"] == prefill
    # Each as if the tokens before it were the prompt, and it were forced upon the model.
    ids = [token["token"] for token in prefill]
    for at in (1, 4) if logprobs else ():
        forced = {"max_new_tokens": 1, "logprobs": 2, "logit_bias": {str(ids[at]): 100}}
        answer = generate(loaded, {"prompt": ids[:at], "parameters": forced})[1]
        (step,) = answer["completions"][0]["logprobs"]
        assert step["token"] == ids[at]
        assert prefill[at]["logprob"] == pytest.approx(step["logprob"], abs=1e-3)
        assert [t["token"] for t in prefill[at]["top"]] == [t["token"] for t in step["top"]]


WRONG_LOADS: list[tuple[Any, str, str]] = [
    (b"{", "InvalidRequest", "not JSON"),
    (b"\xff", "InvalidRequest", "not UTF-8"),
    (b"[" * 100_000, "InvalidRequest", "not JSON"),
    ([], "InvalidRequest", "object"),
    ({"model_dir": "/"}, "InvalidRequest", "name"),
    ({"name": "a"}, "InvalidRequest", "model_dir"),
    ({"name": 1, "model_dir": "/"}, "InvalidRequest", "name"),
    ({"name": "a", "model_dir": "/없음"}, "ArtifactError", "no such model folder"),
    ({"name": "a", "model_dir": "/없음", "lease": True}, "ArtifactError", "no such model folder"),
    ({"name": "a", "model_dir": "/" + "x" * 300}, "ArtifactError", "File name too long"),
    *(
        ({"name": "a", "model_dir": "/", "backend": backend}, "InvalidRequest", "mxnet, native")
        for backend in ("torch", ["mxnet"])
    ),
    *(
        ({"name": "a", "model_dir": "/", "max_rows": rows}, "InvalidRequest", "max_rows")
        for rows in (0, True, "4")
    ),
]


def test_a_wrong_request_gets_an_error_that_says_what_is_wrong(engine: EngineProcess) -> None:
    for method, path, body, status, kind, message in (
        *(("POST", "/models", body, 400, kind, message) for body, kind, message in WRONG_LOADS),
        ("DELETE", "/models/없음", None, 404, "ModelNotFound", "the model is not loaded"),
        ("POST", "/models/a/b/generate", {"inputs": "가"}, 404, "ModelNotFound", "is not loaded"),
        ("POST", "/models/a/generate", b"", 400, "InvalidRequest", "not JSON"),
        ("POST", "/models/a/generate", {}, 400, "InvalidRequest", "inputs"),
        ("POST", "/models/a/generate", {"inputs": ["가"]}, 400, "InvalidRequest", "inputs"),
    ):
        found, error = engine.call(method, quote(path), body)
        assert (found, error["code"], error["type"]) == (status, status, kind)
        assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(loaded: EngineProcess, stream: bool) -> None:
    vocabulary = "the model's vocabulary ends at"
    changes: list[tuple[dict[str, Any], str]] = [
        ({"parameters": []}, "parameters"),
        ({"parameters": {"max_tokens": 1}}, "parameters.max_tokens"),
        ({"parameters": {"temperature": -1}}, "parameters.temperature"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": "가\ud83d"}, "surrogate"),
        ({"prompt": []}, "prompt holds nothing"),
        *(({"prompt": prompt}, "prompt must be") for prompt in (["가"], [1, True], [-1])),
        ({"prompt": [10_000_000]}, vocabulary),
        ({"parameters": {"logit_bias": {"10000000": 1}}}, vocabulary),
        ({"parameters": {"bad_words_ids": [[1, 10**7]]}}, vocabulary),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "안녕"}]}, "add chat_template.jinja"),
        *(({"timeout_s": seconds}, "timeout_s") for seconds in (0, "1", float("nan"))),
    ]
    for change, message in changes:
        status, error = generate(loaded, {"inputs": PROMPT, "stream": stream, **change})
        assert (status, error["type"]) == (400, "InvalidRequest")
        assert message in error["message"]


def test_a_body_longer_than_any_prompt_is_refused_unread(loaded: EngineProcess) -> None:
    """The engine's steps would wait while it is read."""
    body = b'{"inputs": "' + "물".encode() * 3_000_000
    status, error = loaded.call("POST", f"{URL}/generate", body)  # no JSON
    assert (status, error["type"]) == (413, "PromptTooLong")
    assert f"the request has {len(body)} bytes" in error["message"]


def test_a_deadline_is_504_and_in_a_stream_the_last_line(loaded: EngineProcess) -> None:
    body = {**LONG, "timeout_s": 0.1}
    status, error = generate(loaded, body)
    assert (status, error["type"]) == (504, "DeadlineExceeded")
    assert stream(loaded, body)[-1]["error"]["type"] == "DeadlineExceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_row(loaded: EngineProcess, stream: bool) -> None:
    client = loaded.connect()
    client.request("POST", f"{URL}/generate", json.dumps({**LONG, "stream": stream}))
    if stream:  # its lines come while it is made
        response = client.getresponse()
        lines = [json.loads(response.readline()) for _ in range(5)]
        assert all("finish_reason" not in line for line in lines)
        response.close()
    eventually(lambda: loaded.statistics(NAME)["running"] == 1)
    made = loaded.statistics(NAME)["tokens"]
    client.close()
    eventually(lambda: loaded.statistics(NAME)["running"] == 0)
    assert loaded.statistics(NAME)["tokens"] < made + 2000  # it would have gone on to 4,000
    assert loaded.call("GET", "/statistics")[1]["kv_bytes"] == 0


def test_a_request_can_be_cancelled_by_its_id(loaded: EngineProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, loaded, {**LONG, "request_id": "a1"})
        eventually(lambda: loaded.statistics(NAME)["running"] == 1)
        assert loaded.call("DELETE", "/requests/a1") == (204, None)
        status, error = waiting.result(WAIT_S)
    assert (status, error["type"]) == (499, "Cancelled")
    eventually(lambda: loaded.statistics(NAME)["running"] == 0)
    # Also before it comes: then it does not begin.
    assert loaded.call("DELETE", "/requests/b2") == (204, None)
    before = loaded.statistics(NAME)["requests"]
    assert generate(loaded, {**LONG, "request_id": "b2"})[0] == 499
    assert loaded.statistics(NAME)["requests"] == before


def call(app: EngineApp, body: Any, padding: str = "") -> Any:
    """The coroutine of a request for the model m, whose client stays connected."""
    sent = [{"type": "http.request", "body": (json.dumps(body) + padding).encode()}]

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.Event().wait()

    return app._generate(Request({"type": "http", "path_params": {"name": "m"}}, receive))


def test_a_request_is_cancelled_while_it_is_tokenized(
    model_dir: Path, new_engine: NewEngine
) -> None:
    engine = new_engine({"m": model_dir})
    app, gate = EngineApp(engine), Gate()

    async def run() -> None:
        busy = asyncio.wrap_future(engine.with_texts("m", gate))
        waiting = asyncio.ensure_future(call(app, {**LONG, "request_id": "c3"}))
        while "c3" not in app._running:
            await asyncio.sleep(0)
        await app._cancel(Request({"type": "http", "path_params": {"id": "c3"}}))
        with pytest.raises(Cancelled):
            await waiting
        gate.open()
        assert await busy
        await asyncio.wrap_future(engine.with_texts("m", lambda _: None))  # behind the prompt

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    (model,) = engine.models()
    assert (model["requests"], model["running"], model["waiting"]) == (0, 0, 0)


def test_loads_that_wait_for_a_slow_disk_keep_no_other_call_waiting(
    model_dir: Path, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = new_engine({"m": model_dir}), Gate()
    app, loads = EngineApp(engine), 2 * server.MAX_LOADS
    monkeypatch.setattr(engine, "load", lambda **_: gate() and engine._models["m"])

    def load() -> Any:
        body = {"name": "m", "model_dir": str(model_dir)}
        sent = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return sent.pop() if sent else await asyncio.Event().wait()

        return app._load(Request({"type": "http"}, receive))

    async def run() -> list[int]:
        loading = [asyncio.ensure_future(load()) for _ in range(loads)]
        while app._loads.statistics().tasks_waiting < server.MAX_LOADS:
            await asyncio.sleep(0)
        answers = [await app._statistics(Request({"type": "http"}))]
        answers.append(await app._unload(Request({"type": "http", "path_params": {"name": "m"}})))
        await app._statistics(Request({"type": "http"}))
        app.stopping.set()
        gate.open()
        await asyncio.gather(*loading, return_exceptions=True)
        return [answer.status_code for answer in answers]

    assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == [200, 204]


@pytest.mark.parametrize(("tokens", "elsewhere"), [(4, False), (60, True)])
def test_large_bodies_are_read_and_written_on_threads_of_their_own(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_engine: NewEngine,
    tokens: int,
    elsewhere: bool,
) -> None:
    work: dict[str, bool] = {}

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            work[name] = threading.current_thread() is not threading.main_thread()
            return function(*arguments)

        return call

    monkeypatch.setattr(protocol, "read_json", noted("read", protocol.read_json))
    monkeypatch.setattr(server, "JSONResponse", noted("written", server.JSONResponse))
    padding = " " * (protocol.LARGE_BYTES if elsewhere else 0)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, "logprobs": 20}}
    app = EngineApp(new_engine({"m": model_dir}))
    answer = asyncio.run(call(app, body, padding))
    assert len(json.loads(answer.body)["completions"][0]["logprobs"]) == tokens
    assert work == {"read": elsewhere, "written": elsewhere}


# The process


@pytest.mark.slow
def test_requests_under_way_at_sigterm_are_finished(tmp_path: Path, model_dir: Path) -> None:
    files = {path.name for path in model_dir.iterdir()} | {".prepared"}
    with engine_process(tmp_path, ENGINE_BACKEND="native") as engine:
        assert stat.S_IMODE(engine.socket.stat().st_mode) == 0o600
        lease = {"name": NAME, "model_dir": str(model_dir), "lease": True}
        held = engine.open("POST", "/models", lease)
        assert json.loads(held.readline())["name"] == NAME
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 300}, "stream": True}
        finished = engine.open("POST", f"{URL}/generate", body)
        left = engine.open("POST", f"{URL}/generate", {**LONG, "stream": True})
        for response in (finished, left):
            response.readline()
        engine.process.terminate()
        assert held.read() == b""  # the lease ends as a whole answer does
        engine.drop(left)  # a client that disconnects meanwhile
        assert len(list(finished)) == 299
        assert engine.process.wait(WAIT_S) == 0
    assert {path.name for path in model_dir.iterdir()} == files
    assert "Traceback" not in (tmp_path / "engine.log").read_text()


@pytest.mark.slow
def test_a_socket_left_behind_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    with engine_process(tmp_path, ENGINE_BACKEND="native") as engine:
        engine.kill()
        assert engine.socket.exists()
        engine.start()
        assert engine.call("GET", "/health")[0] == 200
    engine.socket.unlink(missing_ok=True)
    engine.socket.write_text("another program's")
    settings = {"ENGINE_SOCKET": str(engine.socket), "ENGINE_BACKEND": "native"}
    assert python("-m", "engine", env=os.environ | settings).returncode != 0
    assert engine.socket.read_text() == "another program's"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ENGINE_BACKEND", "torch"),
        ("ENGINE_BACKEND", "onnxruntime"),  # for GPUs
        ("ENGINE_PRECISION", "int4"),
        ("ENGINE_DEVICE", "tpu"),
        ("ENGINE_MAX_ROWS", "0"),
        ("ENGINE_MEMORY_MIB", "1e3"),
    ],
)
def test_a_wrong_setting_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingError, match=variable):
        read_settings(Settings, {variable: value})


def test_with_a_wrong_setting_nothing_is_started() -> None:
    done = python("-m", "engine", env=os.environ | {"ENGINE_DEVICE": "tpu"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
