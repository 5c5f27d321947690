"""Tokens of teams (TOKENS_FILE) on every API of a running server."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from serving.api import openapi
from tests.e2e.server import Server, eventually, free_port
from tests.e2e.stores import ENDLESS, SHORT, endless, error, serving, small, text
from tests.e2e.test_triton_grpc import prompt, refused

A, B, STREAMS, MANAGE = "tok-a", "tok-나", "tok-다", "manage-라"
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


def bearer(token: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {token}".encode()}


def ask(
    server: Server, method: str, path: str, token: str, body: Any = None, **headers: str
) -> requests.Response:
    sent = {k.replace("_", "-"): v.encode() for k, v in headers.items()}
    return server.request(method, path, json=body, headers={**bearer(token), **sent})


def loaded(server: Server) -> set[str]:
    found = ask(server, "get", "/models", MANAGE).json()["models"]
    return {model["modelName"] for model in found}


def status_of(answer: requests.Response) -> int:
    status = answer.status_code
    return answer.json()["OriginalStatusCode"] if status == 424 else status


def test_a_team_calls_its_own_models_which_that_loads(setup: Setup) -> None:
    assert text(ask(setup.server, "post", "/predictions/가팀/봄", A, SHORT))
    body = {"model": "소월", "prompt": "나는", "max_tokens": 4}
    assert ask(setup.server, "post", "/v1/completions", A, body).status_code == 200
    assert {"가팀/봄", "소월"} <= loaded(setup.server)
    assert ask(setup.server, "post", "/predictions/가팀/봄", "wrong", SHORT).status_code == 401


@pytest.mark.parametrize("port", ["port", "management_port"])
@pytest.mark.parametrize("name", [OTHERS, ALIAS])
def test_no_route_lets_a_team_use_anothers_model(setup: Setup, port: str, name: str) -> None:
    server, tried = setup.server, 0
    before = loaded(server)
    base = f"http://127.0.0.1:{getattr(server, port)}"
    document = openapi.document(managing=port == "management_port")
    for path, methods in document["paths"].items():
        if "{name}" not in path:
            continue
        for method in methods:
            answer = requests.request(
                method,
                base + path.replace("{name}", name).replace("{", "").replace("}", ""),
                json=SHORT if method in ("post", "put") else None,
                headers=bearer(A),
                timeout=60,
            )
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
    assert tried >= (20 if port == "port" else 4)
    assert loaded(server) == before


def test_no_field_or_header_lets_a_team_use_anothers_model(setup: Setup) -> None:
    server = setup.server
    before = loaded(server)
    chat = [{"role": "user", "content": "가"}]
    for path, body in (
        ("/v1/completions", {"prompt": "가"}),
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/responses", {"input": "가"}),
        ("/tokenize", {"prompt": "가"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = ask(server, "post", path, A, {**body, "model": OTHERS})
        assert answer.status_code == 403, path
        assert answer.json()["error"]["message"].endswith(OTHERS)
    for path in ("/invocations", "/endpoints/any/invocations"):
        for headers in (
            {"X_Amzn_SageMaker_Target_Model": f"{OTHERS}.tar.gz"},
            {"X_Amzn_SageMaker_Target_Model": f"/{OTHERS}"},
            {"X_Amzn_SageMaker_Adapter_Identifier": OTHERS},
            {"X_Amzn_SageMaker_Inference_Component": OTHERS},
        ):
            assert status_of(ask(server, "post", path, A, SHORT, **headers)) == 403, headers
        body = {"model": OTHERS, "prompt": "가"}
        assert status_of(ask(server, "post", path, A, body)) == 403
        assert status_of(ask(server, "post", f"{path}?model_name={OTHERS}", A, SHORT)) == 403
    # The model of the route answers, whatever a body names.
    body = {"model": OTHERS, "prompt": "나는", "max_tokens": 2}
    assert ask(server, "post", "/predictions/소월", A, body).json()["model"] == "소월"
    for name in (f"/{OTHERS}", f"가팀/../{OTHERS}", f"가팀//{OTHERS}"):
        answer = ask(server, "post", f"/predictions/{name}".replace("..", "%2e%2e"), A, SHORT)
        assert answer.status_code in (400, 403, 404), name
    assert loaded(server) == before


def test_grpc_denies_a_team_anothers_model(setup: Setup) -> None:
    before = loaded(setup.server)
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
    assert loaded(setup.server) == before


def test_lists_show_a_team_its_own_models_only(setup: Setup) -> None:
    server = setup.server
    for name in ("가팀/봄", "나팀/봄", "소월"):
        with closing(ask(server, "post", f"/v2/repository/models/{name}/load", MANAGE)) as answer:
            assert answer.status_code == 200
    for token, own in ((A, {"가팀/봄", "소월"}), (B, {"나팀/봄", "나팀/여름"})):
        ready = own - {"나팀/여름"}
        found = ask(server, "get", "/models", token).json()["models"]
        assert {model["modelName"] for model in found} == ready
        found = ask(server, "get", "/models?available=true", token).json()["models"]
        assert {model["modelName"] for model in found} == own
        found = ask(server, "get", "/v1/models", token).json()["data"]
        assert {model["id"] for model in found} == own
        found = ask(server, "post", "/v2/repository/index", token).json()
        assert {model["name"] for model in found} == own
        found = ask(server, "get", "/v2/models/stats", token).json()["model_stats"]
        assert {model["name"] for model in found} == ready
        message = watched(server, token)
        assert set(message["models"]) == own
        assert {entry["model"] for entry in message["journal"]} <= own
    assert "비공개" in set(watched(server, MANAGE)["models"])


def watched(server: Server, token: str) -> Any:
    """What the console shows once it has listed the store."""
    headers = bearer(token)
    url = server.url("/console/events")
    shown: dict[str, Any] = {"models": {}, "journal": []}
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: "):
                message = json.loads(line.removeprefix(b"data: "))
                shown["models"] |= message["models"]
                shown["journal"] += message["journal"]
                if message["store"]["listed"]:
                    return shown
    raise AssertionError("the feed has ended")


def test_loading_needs_the_right_and_a_name_that_matches(setup: Setup) -> None:
    server = setup.server
    ask(server, "delete", "/models/나팀/여름", MANAGE)
    for method, path, body in (
        ("post", "/models", {"url": "나팀/여름"}),
        ("put", "/models/나팀/봄?pinned=true", None),
        ("delete", "/models/나팀/봄", None),
        ("post", "/v2/repository/models/나팀/여름/load", None),
        ("post", "/v2/repository/models/나팀/봄/unload", None),
        ("post", "/adapters", {"name": "나팀/여름", "src": "나팀/여름"}),
        ("delete", "/adapters/나팀/봄", None),
    ):
        answer = ask(server, method, path, B, body)
        assert (answer.status_code, "may not load" in answer.text) == (403, True), path
    for body in (
        {"url": OTHERS},
        {"url": OTHERS, "model_name": "가팀/새"},  # by a name of its own
        {"url": "가팀/봄", "model_name": "나팀/새"},
        {"url": str(server.store / OTHERS), "model_name": "가팀/새"},
        {"url": f"file://{server.store / OTHERS}", "model_name": "가팀/새"},
        {"url": "가팀/봄", "model_name": "가팀/새", "base": OTHERS},
    ):
        assert error(ask(server, "post", "/models", A, body)) == (403, "ForbiddenException"), body
    body = {"name": "가팀/새", "src": OTHERS}
    assert error(ask(server, "post", "/adapters", A, body)) == (403, "ForbiddenException")
    assert "나팀/여름" not in loaded(server)
    body = {"url": "가팀/봄", "model_name": "가팀/새"}
    assert ask(server, "post", "/models", A, body).status_code == 200
    assert ask(server, "delete", "/models/가팀/새", A).status_code == 200


def test_a_stream_holds_its_place_until_its_end(setup: Setup) -> None:
    server, body = setup.server, {**ENDLESS, "stream": True}
    body["parameters"] = {**ENDLESS["parameters"], "ignore_eos": True}
    headers = bearer(STREAMS)
    url = server.url("/predictions/느린")
    with requests.post(url, json=body, headers=headers, stream=True, timeout=60) as stream:
        assert stream.status_code == 200
        pieces = stream.iter_lines()  # one that is dropped would close the connection
        next(pieces)
        answer = ask(server, "post", "/predictions/느린", STREAMS, SHORT)
        assert error(answer) == (429, "TooManyRequestsException")
        assert answer.headers["retry-after"] == "1"
        answer = ask(server, "post", "/v1/completions", STREAMS, {"model": "느린", "prompt": "가"})
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert text(ask(server, "post", "/predictions/소월", A, SHORT))  # another token's
    # The client has gone; its place is there again.
    short = {"inputs": "나는", "parameters": {"max_new_tokens": 2}, "stream": True}
    answer = eventually(
        lambda: (
            (found := ask(server, "post", "/predictions/느린", STREAMS, short)).status_code == 200
            and found
        )
    )
    assert answer.text.count("data: ") == 3  # read to its end
    assert text(ask(server, "post", "/predictions/느린", STREAMS, SHORT))


def test_what_a_team_used_is_counted_under_its_name(setup: Setup) -> None:
    server = setup.server

    def counted() -> dict[str, float]:
        shown = server.get("/metrics").text
        assert "tok-" not in shown
        assert hashlib.sha256(A.encode()).hexdigest() not in shown
        found = re.findall(r'kogpt2_token_(\w+)_total\{token="가팀"\} (\S+)', shown)
        return {name: float(value) for name, value in found}

    before = counted()
    made, prompts = 0, 0
    for stream in (False, True):
        body = {"model": "소월", "prompt": "나는 오늘", "max_tokens": 5, "stream": stream}
        answer = ask(server, "post", "/v1/completions", A, {**body, "ignore_eos": True})
        if not stream:
            usage = answer.json()["usage"]
        made, prompts = made + 5, prompts + usage["prompt_tokens"]
    body = {"inputs": "나는 오늘", "parameters": {"max_new_tokens": 5, "ignore_eos": True}}
    answer = ask(server, "post", "/predictions/소월", A, body)  # by the model's worker
    assert answer.json()["tokens"] == 5
    assert "x-kogpt2-tokens" not in answer.headers
    made, prompts = made + 5, prompts + usage["prompt_tokens"]
    after = counted()
    assert after["requests"] - before["requests"] == 3
    assert after["completion_tokens"] - before["completion_tokens"] == made
    assert after["prompt_tokens"] - before["prompt_tokens"] == prompts


def test_a_changed_file_takes_effect_and_a_wrong_one_keeps_the_tokens(setup: Setup) -> None:
    server = setup.server
    limited = {"name": "라팀", "models": ["소월"], "requests_per_minute": 2}
    setup.write({A: {**TEAMS[A], "models": ["가팀/*"]}, "tok-라": limited})
    assert ask(server, "post", "/predictions/소월", A, SHORT).status_code == 403
    assert ask(server, "post", "/predictions/나팀/봄", B, SHORT).status_code == 401
    statuses = [
        ask(server, "post", "/predictions/소월", "tok-라", SHORT).status_code for _ in range(3)
    ]
    assert statuses == [200, 200, 429]
    for wrong in ([{"name": "가팀"}], [{"name": "x", "sha256": "tok-a", "models": []}], "가"):
        setup.write(wrong)
        assert "the 2 tokens before stay" in server.text()
        assert "tok-" not in server.text()
        assert text(ask(server, "post", "/predictions/가팀/봄", A, SHORT))
        assert ask(server, "post", "/predictions/소월", A, SHORT).status_code == 403
    setup.file.write_bytes(b"{")
    setup.write(TEAMS)
    assert text(ask(server, "post", "/predictions/소월", A, SHORT))
    assert server.is_ready()


def test_the_log_has_the_name_of_the_token_and_not_the_token(setup: Setup) -> None:
    server = setup.server
    server.forget_log()
    for token in (A, "tok-wrong"):
        ask(server, "post", "/predictions/소월", token, SHORT)
    requests_ = eventually(
        lambda: (
            len(found := [line for line in lines(server) if line["message"] == "request"]) == 2
            and found
        )
    )
    assert [line.get("token") for line in requests_] == ["가팀", None]
    everything = server.log.read_text("utf-8")
    assert "tok-" not in everything
    assert all(hashlib.sha256(t.encode()).hexdigest() not in everything for t in TEAMS)


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.text().splitlines()]


def test_a_gateway_that_starts_beside_a_wrong_file_takes_none_of_its_tokens(setup: Setup) -> None:
    server = setup.server
    setup.write("가")
    (gateway,) = server.descendants("serving.gateway")
    server.forget_log()
    gateway.kill()
    eventually(lambda: "the 0 tokens before stay" in server.text())
    assert ask(server, "post", "/predictions/소월", A, SHORT).status_code == 401
    assert "소월" in loaded(server)
    setup.write(TEAMS)
    eventually(server.is_ready)
    assert text(ask(server, "post", "/predictions/소월", A, SHORT))


def test_a_wrong_file_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text('{"tokens": [{"name": "가팀", "models": []}]}', encoding="utf-8")
    server = Server(tmp_path, tmp_path, {"TOKENS_FILE": str(file)})
    assert server.process.wait(60) == 1
    assert "the server cannot start: TOKENS_FILE" in server.text()
    assert "tokens[0]: sha256 is missing" in server.text()
