"""The engine's process, asked over its unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.requests import Request

from common.errors import Cancelled
from engine.engine import Engine
from engine.http import protocol, server
from engine.http.server import EngineApp
from engine.settings import Settings
from engine.text.sentencepiece import SentencePieceTokenizer
from tests.engine.conftest import NewEngine
from tests.engine.engines import (
    WAIT_S,
    EngineProcess,
    engine_process,
    is_greedy,
    make_talkative,
    until,
)
from tests.engine.sentences import SENTENCES

NAME = "시/소월 #1?.tar.gz"  # of a model: Korean, a slash, a space, what URLs are made of
PROMPT = "오늘은 날씨가"
LONG = {"inputs": PROMPT, "parameters": {"max_new_tokens": 100_000}}  # some seconds' work


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("models") / "모델", max_length=4096)


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


@pytest.fixture
def url(engine: EngineProcess, model_dir: Path) -> str:
    """The path of a loaded model."""
    status, _ = engine.call("POST", "/models", {"name": NAME, "model_dir": str(model_dir)})
    assert status == 200
    return f"/models/{quote(NAME, safe='')}"


@pytest.mark.slow
def test_the_engine_says_what_a_load_would_lack(engine: EngineProcess, model_dir: Path) -> None:
    asked = {"name": "a", "model_dir": str(model_dir)}
    status, room = engine.call("POST", "/room", asked)
    assert (status, set(room)) == (200, {"weight_bytes"})
    needed, loaded = room["weight_bytes"], 0
    while "missing_bytes" not in room:
        assert loaded < 100
        engine.call("POST", "/models", {**asked, "name": f"m{loaded}"})
        loaded += 1
        status, room = engine.call("POST", "/room", asked)
    assert status == 200
    assert room["missing_bytes"] > 0
    assert room["weight_bytes"] == needed
    assert "MiB" in room["message"]
    # Promises of what is loaded already are kept.
    promised = {"m0": needed, "봄": 1000}
    _, beside = engine.call("POST", "/room", {**asked, "promised": promised})
    assert beside["missing_bytes"] == room["missing_bytes"] + 1000
    for wrong in (["봄"], {"봄": "1000"}):
        assert engine.call("POST", "/room", {**asked, "promised": wrong})[0] == 400


def test_the_engine_says_that_it_is_well(engine: EngineProcess) -> None:
    status, health = engine.call("GET", "/health")
    assert (status, health["status"], health["thread_alive"]) == (200, "ok", True)
    assert health["step_age_s"] >= 0


def test_an_engine_whose_thread_has_ended_is_not_well() -> None:
    engine = Engine(Settings(memory_mib=1))
    health = Request({"type": "http"})
    app = EngineApp(engine)
    assert asyncio.run(app._health(health)).status_code == 200
    engine.close()
    answer = asyncio.run(app._health(health))
    assert (answer.status_code, json.loads(answer.body)["thread_alive"]) == (503, False)


def test_models_are_loaded_listed_and_unloaded(engine: EngineProcess, model_dir: Path) -> None:
    status, loaded = engine.call("POST", "/models", {"name": NAME, "model_dir": str(model_dir)})
    assert status == 200
    assert (loaded["name"], loaded["model_dir"]) == (NAME, str(model_dir))
    assert (loaded["backend"], loaded["precision"]) == ("mxnet", "fp32")
    assert [m["name"] for m in engine.call("GET", "/models")[1]["models"]] == [NAME]

    url = f"/models/{quote(NAME, safe='')}"
    assert engine.call("DELETE", url) == (204, None)
    assert engine.call("GET", "/models") == (200, {"models": []})
    assert engine.call("DELETE", url)[0] == 404


def test_a_prompt_is_continued(engine: EngineProcess, url: str) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 6, "logprobs": 1}}
    status, answer = engine.call("POST", f"{url}/generate", body)
    assert status == 200
    (completion,) = answer["completions"]
    assert (completion["tokens"], completion["finish_reason"]) == (6, "length")
    assert [step["token"] for step in completion["logprobs"]] == [
        step["top"][0]["token"] for step in completion["logprobs"]
    ]
    assert answer["prompt_tokens"] > 1
    assert answer["seconds"] >= answer["time_to_first_token_s"] > 0


def test_a_stream_is_one_token_a_line_and_gives_the_same_text(
    engine: EngineProcess, url: str
) -> None:
    parameters = {"max_new_tokens": 8, "seed": 3, "num_return_sequences": 2}
    body = {"inputs": PROMPT, "parameters": parameters}
    whole = engine.call("POST", f"{url}/generate", body)[1]

    response = engine.open("POST", f"{url}/generate", {**body, "stream": True})
    assert response.headers["Content-Type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response]

    assert len(lines) == 16
    for index, completion in enumerate(whole["completions"]):
        mine = [line for line in lines if line["index"] == index]
        assert "".join(line["text"] for line in mine) == completion["text"]
        reasons = [line["finish_reason"] for line in mine if "finish_reason" in line]
        assert reasons == [completion["finish_reason"]]


def test_a_text_and_its_ids_are_continued_alike(engine: EngineProcess, url: str) -> None:
    parameters = {"max_new_tokens": 6, "logprobs": 0}
    _, whole = engine.call("POST", f"{url}/generate", {"prompt": PROMPT, "parameters": parameters})
    ids = [step["token"] for step in whole["completions"][0]["logprobs"]]
    texts = [step["text"] for step in whole["completions"][0]["logprobs"]]
    assert "".join(texts) == whole["completions"][0]["text"]

    body = {"prompt": ids, "parameters": {"max_new_tokens": 3}, "stream": True}
    first, *_ = [json.loads(line) for line in engine.open("POST", f"{url}/generate", body)]
    assert first["prompt_tokens"] == len(ids)
    body = {"prompt": ids, "parameters": {"max_new_tokens": 3}}
    assert engine.call("POST", f"{url}/generate", body)[1]["prompt_tokens"] == len(ids)


def test_a_text_becomes_ids_and_text_again(engine: EngineProcess, url: str) -> None:
    asked = {"prompt": PROMPT, "parameters": {"decoder_input_details": True}}
    prefill = engine.call("POST", f"{url}/generate", asked)[1]["completions"][0]["prefill"]
    status, found = engine.call("POST", f"{url}/tokenize", {"prompt": PROMPT})
    assert status == 200
    assert found["tokens"] == [token["token"] for token in prefill]
    assert found["texts"] == [token["text"] for token in prefill]
    plain = engine.call("POST", f"{url}/tokenize", {"prompt": PROMPT, "special": False})[1]
    assert plain["tokens"] == found["tokens"][1:]
    long = engine.call("POST", f"{url}/tokenize", {"prompt": PROMPT * 1000})[1]
    assert len(long["tokens"]) > long["max_length"]  # whoever counts wants to know
    back = engine.call("POST", f"{url}/detokenize", {"tokens": found["tokens"]})
    assert back == (200, {"text": f" {PROMPT}"})
    for route, body in (
        ("tokenize", {"prompt": [1]}),
        ("tokenize", {"inputs": PROMPT}),
        ("detokenize", {"tokens": PROMPT}),
        ("detokenize", {"tokens": [10**6]}),
    ):
        assert engine.call("POST", f"{url}/{route}", body)[0] == 400


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_prompts_tokens_come_back_when_they_are_asked_for(
    engine: EngineProcess, url: str, logprobs: int | None
) -> None:
    given = {"max_new_tokens": 3, "decoder_input_details": True, "logprobs": logprobs}
    body: dict[str, Any] = {"prompt": PROMPT * 3, "parameters": given}
    _, whole = engine.call("POST", f"{url}/generate", body)
    (completion,) = whole["completions"]
    prefill = completion["prefill"]
    assert len(prefill) == whole["prompt_tokens"]
    assert "".join(token["text"] for token in prefill) == "<s> " + PROMPT * 3
    assert "logprob" not in prefill[0]
    assert [token.get("special", False) for token in prefill] == [True] + [False] * (
        len(prefill) - 1
    )
    first, *_ = [
        json.loads(line)
        for line in engine.open("POST", f"{url}/generate", {**body, "stream": True})
    ]
    assert first["prefill"] == prefill

    # Each as if the tokens before it were the prompt, and it were forced upon the model.
    for at in (1, 4) if logprobs else ():
        ids = [token["token"] for token in prefill]
        forced = {"max_new_tokens": 1, "logprobs": 2, "logit_bias": {str(ids[at]): 100}}
        body = {"prompt": ids[:at], "parameters": forced}
        (step,) = engine.call("POST", f"{url}/generate", body)[1]["completions"][0]["logprobs"]
        assert step["token"] == ids[at]
        assert prefill[at]["logprob"] == pytest.approx(step["logprob"], abs=1e-3)
        assert [t["token"] for t in prefill[at]["top"]] == [t["token"] for t in step["top"]]


def test_a_stream_comes_while_it_is_made(engine: EngineProcess, url: str) -> None:
    response = engine.open("POST", f"{url}/generate", {**LONG, "stream": True})
    lines = [json.loads(response.readline()) for _ in range(5)]
    assert engine.statistics(NAME)["running"] == 1  # and yet there are lines to read
    assert all("finish_reason" not in line for line in lines)
    engine.drop(response)


def test_requests_at_once_share_steps_and_are_exact(
    engine: EngineProcess, url: str, model_dir: Path
) -> None:
    body = {"parameters": {"max_new_tokens": 40}, "stream": True}
    responses = [
        engine.open("POST", f"{url}/generate", {**body, "inputs": sentence})
        for sentence in SENTENCES
    ]
    ids = [[json.loads(line)["token"] for line in response] for response in responses]
    found = engine.statistics(NAME)
    assert found["rows"] > 2 * found["steps"]
    encode = SentencePieceTokenizer(model_dir / "kogpt2.spiece").encode
    for sentence, new in zip(SENTENCES, ids, strict=True):
        assert is_greedy(model_dir, encode(sentence), new)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind", "said"),
    [
        ("POST", "/models", b"{", 400, "InvalidRequest", "not JSON"),
        ("POST", "/models", b"\xff", 400, "InvalidRequest", "not UTF-8"),
        ("POST", "/models", b"[" * 100_000, 400, "InvalidRequest", "not JSON"),
        ("POST", "/models", [], 400, "InvalidRequest", "object"),
        ("POST", "/models", {"model_dir": "/"}, 400, "InvalidRequest", "name"),
        ("POST", "/models", {"name": "a"}, 400, "InvalidRequest", "model_dir"),
        ("POST", "/models", {"name": 1, "model_dir": "/"}, 400, "InvalidRequest", "name"),
        ("POST", "/models", {"name": "a", "model_dir": "/없음"}, 400, "ArtifactError", "없음"),
        ("POST", "/models", {"name": "a", "model_dir": "/" + "x" * 300}, 400, "ArtifactError", "x"),
        (
            "POST",
            "/models",
            {"name": "a", "model_dir": "/", "backend": "torch"},
            400,
            "InvalidRequest",
            "mxnet, native",
        ),
        (
            "POST",
            "/models",
            {"name": "a", "model_dir": "/", "backend": ["mxnet"]},
            400,
            "InvalidRequest",
            "mxnet, native",
        ),
        *(
            (
                "POST",
                "/models",
                {"name": "a", "model_dir": "/", "max_rows": rows},
                400,
                "InvalidRequest",
                "max_rows",
            )
            for rows in (0, True, "4")
        ),
        ("DELETE", "/models/없음", None, 404, "ModelNotFound", "없음"),
        ("POST", "/models/a/b/generate", {"inputs": "가"}, 404, "ModelNotFound", "a/b"),
        ("POST", "/models/a/generate", b"", 400, "InvalidRequest", "not JSON"),
        ("POST", "/models/a/generate", {}, 400, "InvalidRequest", "inputs"),
        ("POST", "/models/a/generate", {"inputs": ["가"]}, 400, "InvalidRequest", "inputs"),
    ],
)
def test_a_wrong_request_gets_an_error_that_says_what_is_wrong(
    engine: EngineProcess, method: str, path: str, body: Any, status: int, kind: str, said: str
) -> None:
    found, error = engine.call(method, quote(path), body)
    assert (found, error["code"], error["type"]) == (status, status, kind)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameters": []}, "parameters"),
        ({"parameters": {"max_tokens": 1}}, "parameters.max_tokens"),
        ({"parameters": {"temperature": -1}}, "parameters.temperature"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": "가\ud83d"}, "surrogate"),
        ({"prompt": []}, "prompt holds nothing"),
        ({"prompt": ["가"]}, "prompt must be"),
        ({"prompt": [1, True]}, "prompt must be"),
        ({"prompt": [-1]}, "prompt must be"),
        ({"prompt": [10_000_000]}, "the model's vocabulary ends at"),
        ({"parameters": {"logit_bias": {"10000000": 1}}}, "the model's vocabulary ends at"),
        ({"parameters": {"bad_words_ids": [[1, 10**7]]}}, "the model's vocabulary ends at"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "안녕"}]}, "add chat_template.jinja"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "1"}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(
    engine: EngineProcess, url: str, change: dict[str, Any], said: str, stream: bool
) -> None:
    body = {"inputs": PROMPT, "stream": stream, **change}
    status, error = engine.call("POST", f"{url}/generate", body)
    assert (status, error["type"]) == (400, "InvalidRequest")
    assert said in error["message"]


def test_what_no_prompt_needs_is_refused_unread(engine: EngineProcess, url: str) -> None:
    """The engine's steps would wait while it is read."""
    body = b'{"inputs": "' + "물".encode() * 3_000_000
    status, error = engine.call("POST", f"{url}/generate", body)  # no JSON
    assert (status, error["type"]) == (413, "PromptTooLong")
    assert f"the request has {len(body)} bytes" in error["message"]


def test_a_deadline_is_504_and_in_a_stream_the_last_line(engine: EngineProcess, url: str) -> None:
    body = {**LONG, "timeout_s": 0.1}
    status, error = engine.call("POST", f"{url}/generate", body)
    assert (status, error["type"]) == (504, "DeadlineExceeded")
    lines = [json.loads(x) for x in engine.open("POST", f"{url}/generate", body | {"stream": True})]
    assert lines[-1]["error"]["type"] == "DeadlineExceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(
    engine: EngineProcess, url: str, stream: bool
) -> None:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(str(engine.socket))
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST {url}/generate HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    until(lambda: engine.statistics(NAME)["running"] == 1)
    made = engine.statistics(NAME)["tokens"]

    client.close()

    until(lambda: engine.statistics(NAME)["running"] == 0)
    assert engine.statistics(NAME)["tokens"] < made + 2000  # it would have gone on to 4,000
    assert engine.call("GET", "/statistics")[1]["kv_bytes"] == 0


def test_a_request_can_be_cancelled_by_its_id(engine: EngineProcess, url: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {**LONG, "request_id": "a1"}
        waiting = pool.submit(engine.call, "POST", f"{url}/generate", body)
        until(lambda: engine.statistics(NAME)["running"] == 1)
        assert engine.call("DELETE", "/requests/a1") == (204, None)
        status, error = waiting.result(WAIT_S)
    assert (status, error["type"]) == (499, "Cancelled")
    until(lambda: engine.statistics(NAME)["running"] == 0)


def test_a_request_that_was_cancelled_before_it_came_does_not_begin(
    engine: EngineProcess, url: str
) -> None:
    assert engine.call("DELETE", "/requests/b2") == (204, None)
    before = engine.statistics(NAME)["requests"]
    assert engine.call("POST", f"{url}/generate", {**LONG, "request_id": "b2"})[0] == 499
    assert engine.statistics(NAME)["requests"] == before


def call(app: EngineApp, body: Any, padding: str = "") -> Any:
    """The coroutine of a request for the model m, whose client stays connected."""
    sent = [{"type": "http.request", "body": (json.dumps(body) + padding).encode()}]

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.Event().wait()

    return app._generate(Request({"type": "http", "path_params": {"name": "m"}}, receive))


def test_a_request_can_be_cancelled_while_its_prompt_is_cut(
    model_dir: Path, new_engine: NewEngine
) -> None:
    engine = new_engine(memory_mib=32)
    engine.load("m", str(model_dir))
    app, go_on = EngineApp(engine), threading.Event()

    async def run() -> None:
        busy = asyncio.wrap_future(engine.with_texts("m", lambda _: go_on.wait(WAIT_S)))
        waiting = asyncio.ensure_future(call(app, {**LONG, "request_id": "c3"}))
        while "c3" not in app._running:
            await asyncio.sleep(0)
        await app._cancel(Request({"type": "http", "path_params": {"id": "c3"}}))
        with pytest.raises(Cancelled):
            await waiting
        go_on.set()
        assert await busy
        await asyncio.wrap_future(engine.with_texts("m", lambda _: None))  # behind the prompt

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    (model,) = engine.models()
    assert (model["requests"], model["running"], model["waiting"]) == (0, 0, 0)


@pytest.mark.parametrize(("tokens", "elsewhere"), [(4, False), (60, True)])
def test_large_bodies_are_read_and_written_beside_the_event_loop(
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
    engine = new_engine(memory_mib=32)
    engine.load("m", str(model_dir))
    answer = asyncio.run(call(EngineApp(engine), body, padding))
    assert len(json.loads(answer.body)["completions"][0]["logprobs"]) == tokens
    assert work == {"read": elsewhere, "written": elsewhere}


# Leases


def lease(engine: EngineProcess, model_dir: Path, name: str = NAME) -> Any:
    body = {"name": name, "model_dir": str(model_dir), "lease": True}
    response = engine.open("POST", "/models", body)
    assert response.status == 200
    assert json.loads(response.readline())["name"] == name
    return response


def test_a_model_is_unloaded_soon_after_its_last_lease_ends(
    engine: EngineProcess, model_dir: Path
) -> None:
    first, second = lease(engine, model_dir), lease(engine, model_dir)
    lasting = lease(engine, model_dir, "other")
    engine.drop(first)
    engine.drop(second)
    until(lambda: not engine.statistics(NAME))
    assert engine.statistics("other")
    engine.drop(lasting)


def test_a_lease_that_cannot_be_had_is_refused_like_a_load(
    engine: EngineProcess, tmp_path: Path
) -> None:
    body = {"name": "a", "model_dir": str(tmp_path), "lease": True}
    status, error = engine.call("POST", "/models", body)
    assert (status, error["type"]) == (400, "ArtifactError")


# The process


def test_the_socket_is_for_this_user_only(engine: EngineProcess) -> None:
    assert stat.S_IMODE(engine.socket.stat().st_mode) == 0o600


@pytest.mark.slow
def test_the_engine_ends_at_sigterm_and_leaves_the_models_alone(
    tmp_path: Path, model_dir: Path
) -> None:
    files = {path.name for path in model_dir.iterdir()} | {".prepared"}  # what was found in it
    with engine_process(tmp_path) as engine:
        held = lease(engine, model_dir)
        assert engine.terminate() == 0
        assert held.read() == b""  # the lease ends as a whole answer does
        engine.drop(held)
    assert {path.name for path in model_dir.iterdir()} == files
    assert "Traceback" not in (tmp_path / "engine.log").read_text()


@pytest.mark.slow
def test_requests_under_way_at_sigterm_are_finished(tmp_path: Path, model_dir: Path) -> None:
    with engine_process(tmp_path) as engine:
        engine.call("POST", "/models", {"name": "m", "model_dir": str(model_dir)})
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 300}, "stream": True}
        response = engine.open("POST", "/models/m/generate", body)
        response.readline()
        engine.process.terminate()
        assert len(list(response)) == 299
        assert engine.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_the_engine_ends_though_a_client_left_while_it_was_stopping(
    tmp_path: Path, model_dir: Path
) -> None:
    with engine_process(tmp_path) as engine:
        engine.call("POST", "/models", {"name": "m", "model_dir": str(model_dir)})
        response = engine.open("POST", "/models/m/generate", {**LONG, "stream": True})
        response.readline()
        engine.process.terminate()
        time.sleep(0.3)
        engine.drop(response)
        assert engine.process.wait(WAIT_S) == 0
    assert "Traceback" not in (tmp_path / "engine.log").read_text()


@pytest.mark.slow
def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    with engine_process(tmp_path) as engine:
        engine.kill()
        assert engine.socket.exists()
        engine.start()
        assert engine.call("GET", "/health")[0] == 200


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.slow
def test_a_file_in_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "engine.sock").write_text("somebody's")
    done = run(ENGINE_SOCKET=str(tmp_path / "engine.sock"))
    assert done.returncode != 0
    assert (tmp_path / "engine.sock").read_text() == "somebody's"


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
def test_a_wrong_setting_is_named_and_nothing_is_started(variable: str, value: str) -> None:
    done = run(**{"ENGINE_BACKEND": "mxnet", variable: value})
    assert done.returncode == 2
    assert variable in done.stderr
    assert "Traceback" not in done.stderr
