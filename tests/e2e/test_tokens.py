"""Tokens of teams (TOKENS_FILE) on every API of a running server."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.e2e.server import Server, eventually, free_port
from tests.e2e.stores import (
    ENDLESS,
    SHORT,
    bearer,
    endless,
    error,
    every_call,
    serving,
    small,
    status_of,
    text,
)
from tests.e2e.test_triton import prompt, refused
from tests.engine.adapters import make_adapter

A, B, STREAMS, MANAGE = "tok-a", "tok-나", "tok-다", "manage-all"
# `a` may load and `b` may not.
TEAMS: dict[str, dict[str, Any]] = {
    A: {"name": "가팀", "models": ["가팀/*", "소월"], "load": True},
    B: {"name": "나팀", "models": ["나팀/*"]},
    STREAMS: {"name": "다팀", "models": ["느린"], "concurrency": 1},
}
OTHERS, ALIAS = "나팀/봄", "가팀/별칭"  # which stands for it


class Setup:
    def __init__(self, server: Server, file: Path) -> None:
        self.server, self.file = server, file

    def write(self, teams: Any) -> None:
        """Replaces the file, and waits until the server has told that it has read it."""
        self.server.forget_log()
        write(self.file, teams)
        eventually(lambda: "TOKENS_FILE" in self.server.text())

    def ask(
        self, method: str, path: str, token: str, body: Any = None, **headers: str
    ) -> requests.Response:
        sent = bearer(token) | {k.replace("_", "-"): v.encode() for k, v in headers.items()}
        return self.server.request(method, path, json=body, headers=sent)

    def loaded(self) -> set[str]:
        found = self.ask("get", "/models", MANAGE).json()["models"]
        return {model["modelName"] for model in found}


def write(file: Path, teams: Any) -> None:
    entries = teams
    if isinstance(teams, dict):
        hashes = {token: hashlib.sha256(token.encode()).hexdigest() for token in teams}
        entries = [{**fields, "sha256": hashes[token]} for token, fields in teams.items()]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"tokens": entries}, ensure_ascii=False), encoding="utf-8")
    new.replace(file)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("tokens")
    for seed, name in enumerate(("가팀/봄", "나팀/봄", "나팀/여름", "소월", "비공개")):
        small(folder / "store" / name, seed)
    endless(folder / "store" / "느린")
    aliases = json.dumps({ALIAS: OTHERS})
    (folder / "store" / "aliases.json").write_text(aliases, encoding="utf-8")
    file = folder / "tokens.json"
    write(file, TEAMS)
    settings = {"TOKENS_FILE": str(file), "MANAGEMENT_TOKEN": MANAGE, "GRPC_PORT": str(free_port())}
    with serving(folder / "run", folder / "store", **settings) as server:
        yield Setup(server, file)


def test_a_team_calls_its_own_models_which_that_loads(setup: Setup) -> None:
    assert text(setup.ask("post", "/predictions/가팀/봄", A, SHORT))
    body = {"model": "소월", "prompt": "나는", "max_tokens": 4}
    assert setup.ask("post", "/v1/completions", A, body).status_code == 200
    assert {"가팀/봄", "소월"} <= setup.loaded()
    assert setup.ask("post", "/predictions/가팀/봄", "wrong", SHORT).status_code == 401
    refused = setup.ask("post", "/v1/completions", "wrong", body)
    told = refused.json()["error"]
    assert (refused.status_code, told["code"]) == (401, "invalid_api_key")
    assert "Incorrect API key provided: send a token of" in told["message"]


@pytest.mark.parametrize("management", [False, True])
@pytest.mark.parametrize("name", [OTHERS, ALIAS])
def test_no_route_lets_a_team_use_anothers_model(setup: Setup, management: bool, name: str) -> None:
    tried = 0
    before = setup.loaded()
    for method, route, path, body in every_call(name, managing=management):
        if "{name}" not in route:
            continue
        sent = {"json": body, "headers": bearer(A)}
        answer = setup.server.request(method, path, management=management, **sent)
        assert answer.status_code == 403, (method, path, answer.text)
        if path.startswith("/v1/"):
            assert set(answer.json()) == {"error"}
            assert answer.json()["error"]["type"] == "invalid_request_error"
        elif path.startswith("/v2/"):
            assert set(answer.json()) == {"error"}
        else:
            assert error(answer) == (403, "ForbiddenException")
        assert A not in answer.text
        tried += 1
    assert tried >= (4 if management else 20)
    assert setup.loaded() == before


def test_no_field_or_header_lets_a_team_use_anothers_model(setup: Setup) -> None:
    before = setup.loaded()
    chat = [{"role": "user", "content": "가"}]
    for path, body in (
        ("/v1/completions", {"prompt": "가"}),
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/responses", {"input": "가"}),
        ("/tokenize", {"prompt": "가"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = setup.ask("post", path, A, {**body, "model": OTHERS})
        assert answer.status_code == 403, path
        assert answer.json()["error"]["message"].endswith(OTHERS)
    for path in ("/invocations", "/endpoints/any/invocations"):
        for headers in (
            {"X_Amzn_SageMaker_Target_Model": f"{OTHERS}.tar.gz"},
            {"X_Amzn_SageMaker_Target_Model": f"/{OTHERS}"},
            {"X_Amzn_SageMaker_Adapter_Identifier": OTHERS},
            {"X_Amzn_SageMaker_Inference_Component": OTHERS},
        ):
            assert status_of(setup.ask("post", path, A, SHORT, **headers)) == 403, headers
        body = {"model": OTHERS, "prompt": "가"}
        assert status_of(setup.ask("post", path, A, body)) == 403
        assert status_of(setup.ask("post", f"{path}?model_name={OTHERS}", A, SHORT)) == 403
    # The model of the route answers, whatever a body names.
    body = {"model": OTHERS, "prompt": "나는", "max_tokens": 2}
    assert setup.ask("post", "/predictions/소월", A, body).json()["model"] == "소월"
    for name in (f"/{OTHERS}", f"가팀/../{OTHERS}", f"가팀//{OTHERS}"):
        answer = setup.ask("post", f"/predictions/{name}".replace("..", "%2e%2e"), A, SHORT)
        assert answer.status_code in (400, 403, 404), name
    assert setup.loaded() == before


def test_grpc_denies_a_team_anothers_model(setup: Setup) -> None:
    before = setup.loaded()
    headers = {"authorization": f"Bearer {A}"}
    with triton.InferenceServerClient(setup.server.grpc_address) as client:
        calls = [
            lambda: client.infer(OTHERS, [prompt()], headers=headers),
            lambda: client.is_model_ready(OTHERS, headers=headers),
            lambda: client.get_model_metadata(OTHERS, headers=headers),
            lambda: client.get_model_config(OTHERS, headers=headers),
            lambda: client.get_inference_statistics(OTHERS, headers=headers),
            lambda: client.load_model(OTHERS, headers=headers),
            lambda: client.unload_model(OTHERS, headers=headers),
        ]
        for call in calls:
            status, said = refused(call)
            assert (status, OTHERS in said) == ("PERMISSION_DENIED", True)
        managing = {"authorization": f"Bearer {MANAGE}"}
        client.load_model("비공개", headers=managing)
        assert "비공개" in setup.loaded()
        client.unload_model("비공개", headers=managing)
        index = client.get_model_repository_index(headers=headers)
        assert {model.name for model in index.models} == {"가팀/봄", "소월"}
        assert client.infer("소월", [prompt()], headers=headers).as_numpy("generated_text").size
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append((result, error)), headers=headers)
        client.async_stream_infer(OTHERS, [prompt()])
        _, said = eventually(lambda: answers)[0]
        assert isinstance(said, InferenceServerException)
        assert OTHERS in str(said)
        client.stop_stream()
    assert setup.loaded() == before


def test_lists_show_a_team_its_own_models_only(setup: Setup) -> None:
    for name in ("가팀/봄", "나팀/봄", "소월"):
        assert setup.ask("post", f"/v2/repository/models/{name}/load", MANAGE).ok
    for token, own in ((A, {"가팀/봄", "소월"}), (B, {"나팀/봄", "나팀/여름"})):
        ready = own - {"나팀/여름"}
        found = setup.ask("get", "/models", token).json()["models"]
        assert {model["modelName"] for model in found} == ready
        found = setup.ask("get", "/models?available=true", token).json()["models"]
        assert {model["modelName"] for model in found} == own
        found = setup.ask("get", "/v1/models", token).json()["data"]
        assert {model["id"] for model in found} == own
        found = setup.ask("post", "/v2/repository/index", token).json()
        assert {model["name"] for model in found} == own
        found = setup.ask("get", "/v2/models/stats", token).json()["model_stats"]
        assert {model["name"] for model in found} == ready
        message = watched(setup, token)
        assert set(message["models"]) == own
        assert {entry["model"] for entry in message["journal"]} <= own
    assert "비공개" in set(watched(setup, MANAGE)["models"])


def watched(setup: Setup, token: str) -> Any:
    """Return what the console shows once it has listed the store."""
    shown: dict[str, Any] = {"models": {}, "journal": []}
    with setup.server.get("/console/events", headers=bearer(token), stream=True) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: "):
                message = json.loads(line.removeprefix(b"data: "))
                shown["models"] |= message["models"]
                shown["journal"] += message["journal"]
                if message["store"]["listed"]:
                    return shown
    raise AssertionError("the feed has ended")


def test_loading_needs_the_right_and_a_name_that_matches(setup: Setup) -> None:
    setup.ask("delete", "/models/나팀/여름", MANAGE)
    for method, path, body in (
        ("post", "/models", {"url": "나팀/여름"}),
        ("put", "/models/나팀/봄?pinned=true", None),
        ("delete", "/models/나팀/봄", None),
        ("post", "/v2/repository/models/나팀/여름/load", None),
        ("post", "/v2/repository/models/나팀/봄/unload", None),
        ("post", "/adapters", {"name": "나팀/여름", "src": "나팀/여름"}),
        ("delete", "/adapters/나팀/봄", None),
    ):
        answer = setup.ask(method, path, B, body)
        assert (answer.status_code, "may not load" in answer.text) == (403, True), path
    for body in (
        {"url": OTHERS},
        {"url": OTHERS, "model_name": "가팀/새"},  # by a name of its own
        {"url": "가팀/봄", "model_name": "나팀/새"},
        {"url": str(setup.server.store / OTHERS), "model_name": "가팀/새"},
        {"url": f"file://{setup.server.store / OTHERS}", "model_name": "가팀/새"},
        {"url": "가팀/봄", "model_name": "가팀/새", "base": OTHERS},
    ):
        assert error(setup.ask("post", "/models", A, body)) == (403, "ForbiddenException"), body
    body = {"name": "가팀/새", "src": OTHERS}
    assert error(setup.ask("post", "/adapters", A, body)) == (403, "ForbiddenException")
    assert "나팀/여름" not in setup.loaded()
    body = {"url": "가팀/봄", "model_name": "가팀/새"}
    assert setup.ask("post", "/models", A, body).status_code == 200
    assert setup.ask("delete", "/models/가팀/새", A).status_code == 200


def test_an_adapter_lets_no_team_use_anothers_model(setup: Setup) -> None:
    """Its files, which the team writes, name the base."""
    store, name = setup.server.store, "가팀/말투"
    config = {"base_model_name_or_path": OTHERS}
    adapter = make_adapter(store / name, store / OTHERS, config=config)
    reason = "가팀 may not use the base of this model"

    def check() -> None:
        for path, body in (
            (f"/predictions/{name}", SHORT),
            ("/v1/completions", {"model": name, "prompt": "나는"}),
            ("/generate", {"inputs": "나는", "parameters": {"adapter_id": name}}),
        ):
            answer = setup.ask("post", path, A, body)
            assert (answer.status_code, reason in answer.text) == (403, True), answer.text
        with triton.InferenceServerClient(setup.server.grpc_address) as client:
            headers = {"authorization": f"Bearer {A}"}
            status, message = refused(lambda: client.infer(name, [prompt()], headers=headers))
            assert (status, reason in message) == ("PERMISSION_DENIED", True)

    check()
    assert reason in setup.ask("post", "/models", A, {"url": name}).text
    assert reason in setup.ask("post", f"/v2/repository/models/{name}/load", A).text
    assert name not in setup.loaded()
    assert setup.ask("post", "/models", MANAGE, {"url": name}).status_code == 200
    check()  # loaded by another
    assert setup.ask("get", f"/models/{name}", A).status_code == 403
    assert name not in setup.ask("get", "/models", A).text
    assert OTHERS not in str(watched(setup, A))
    assert setup.ask("delete", f"/models/{name}", MANAGE).status_code == 200
    shutil.rmtree(adapter)


def test_a_stream_holds_its_place_until_its_end(setup: Setup) -> None:
    body = {**ENDLESS, "stream": True}
    body["parameters"] = {**ENDLESS["parameters"], "ignore_eos": True}
    sent = {"json": body, "headers": bearer(STREAMS)}
    with setup.server.post("/predictions/느린", stream=True, **sent) as stream:
        assert stream.status_code == 200
        pieces = stream.iter_lines()  # one that is dropped would close the connection
        next(pieces)
        answer = setup.ask("post", "/predictions/느린", STREAMS, SHORT)
        assert error(answer) == (429, "TooManyRequestsException")
        assert answer.headers["retry-after"] == "1"
        answer = setup.ask("post", "/v1/completions", STREAMS, {"model": "느린", "prompt": "가"})
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert text(setup.ask("post", "/predictions/소월", A, SHORT))  # another token's
    # The client has gone; its place is there again.
    short = {"inputs": "나는", "parameters": {"max_new_tokens": 2}, "stream": True}
    ask = functools.partial(setup.ask, "post", "/predictions/느린", STREAMS)
    eventually(lambda: ask(short).text.count("data: ") == 3)  # read to its end
    assert text(setup.ask("post", "/predictions/느린", STREAMS, SHORT))


def test_what_a_team_used_is_counted_under_its_name(setup: Setup) -> None:

    def counted() -> dict[str, float]:
        shown = setup.server.get("/metrics").text
        assert "tok-" not in shown
        assert hashlib.sha256(A.encode()).hexdigest() not in shown
        found = re.findall(r'kogpt2_token_(\w+)_total\{token="가팀"\} (\S+)', shown)
        return {name: float(value) for name, value in found}

    before = counted()
    made, prompts = 0, 0
    for stream in (False, True):
        body = {"model": "소월", "prompt": "나는 오늘", "max_tokens": 5, "stream": stream}
        answer = setup.ask("post", "/v1/completions", A, {**body, "ignore_eos": True})
        if not stream:
            usage = answer.json()["usage"]
        made, prompts = made + 5, prompts + usage["prompt_tokens"]
    body = {"inputs": "나는 오늘", "parameters": {"max_new_tokens": 5, "ignore_eos": True}}
    answer = setup.ask("post", "/predictions/소월", A, body)  # by the model's worker
    assert answer.json()["tokens"] == 5
    assert "x-kogpt2-tokens" not in answer.headers
    made, prompts = made + 5, prompts + usage["prompt_tokens"]
    after = counted()
    assert after["requests"] - before["requests"] == 3
    assert after["completion_tokens"] - before["completion_tokens"] == made
    assert after["prompt_tokens"] - before["prompt_tokens"] == prompts


def test_a_changed_file_takes_effect_and_a_wrong_one_keeps_the_tokens(setup: Setup) -> None:
    setup.write({A: {**TEAMS[A], "models": ["가팀/*"]}})
    assert setup.ask("post", "/predictions/소월", A, SHORT).status_code == 403
    assert setup.ask("post", "/predictions/나팀/봄", B, SHORT).status_code == 401
    setup.write([{"name": "x", "sha256": "tok-a", "models": []}])  # others: serving/test_tokens.py
    assert "the 1 tokens before stay" in setup.server.text()
    assert "tok-" not in setup.server.text()
    assert text(setup.ask("post", "/predictions/가팀/봄", A, SHORT))
    assert setup.ask("post", "/predictions/소월", A, SHORT).status_code == 403
    # A gateway that starts beside it takes none of its tokens.
    setup.server.descendants("serving.gateway")[0].kill()
    eventually(lambda: "the 0 tokens before stay" in setup.server.text())
    assert setup.ask("post", "/predictions/가팀/봄", A, SHORT).status_code == 401
    assert "소월" in setup.loaded()
    setup.write(TEAMS)
    eventually(setup.server.is_ready)
    assert text(setup.ask("post", "/predictions/소월", A, SHORT))


def test_the_log_has_the_name_of_the_token_and_not_the_token(setup: Setup) -> None:
    answers = [setup.ask("post", "/predictions/소월", token, SHORT) for token in (A, "tok-wrong")]
    ids = [answer.headers["x-request-id"] for answer in answers]

    def tokens() -> list[str | None]:
        lines = [json.loads(line) for line in setup.server.text().splitlines()]
        return [line.get("token") for line in lines if line.get("request_id") in ids]

    eventually(lambda: tokens() == ["가팀", None])
    everything = setup.server.log.read_text("utf-8")
    assert "tok-" not in everything
    assert all(hashlib.sha256(t.encode()).hexdigest() not in everything for t in TEAMS)


def test_a_wrong_file_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text('{"tokens": [{"name": "가팀", "models": []}]}', encoding="utf-8")
    server = Server(tmp_path, tmp_path, {"TOKENS_FILE": str(file)})
    assert server.process.wait(60) == 1
    assert "the server cannot start: TOKENS_FILE" in server.text()
    assert "tokens[0]: sha256 is missing" in server.text()
