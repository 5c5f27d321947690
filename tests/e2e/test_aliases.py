"""Aliases of a running server, on every API. From S3, and preloaded: test_on_demand.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
import requests
import tritonclient.grpc as triton

from tests.e2e.server import Server, eventually
from tests.e2e.stores import events, greedy, small, text
from tests.e2e.test_triton import Stream, generated, prompt, refused
from tests.scripts.command import run

pytestmark = pytest.mark.slow

OLD, NEW = "상담-7", "상담-8"
SPLIT = {"시": OLD, "상담": {OLD: 3, NEW: 1}}
TOKENS = 8
BODY = {"inputs": "나는 오늘", "parameters": {"max_new_tokens": TOKENS}}
COMPLETION = {"prompt": "나는 오늘", "max_tokens": TOKENS, "temperature": 0}


class Setup:
    def __init__(self, server: Server) -> None:
        self.server = server
        aliases = json.dumps(SPLIT, ensure_ascii=False)
        (server.store / "aliases.json").write_text(aliases, encoding="utf-8")
        eventually(lambda: "aliases.json has" in server.text())
        self.wanted = greedy(server, OLD, TOKENS)  # by which an answer tells its model
        assert self.wanted != greedy(server, NEW, TOKENS)

    def post(self, path: str, body: Any, **headers: str) -> requests.Response:
        sent = {name.replace("_", "-"): value.encode() for name, value in headers.items()}
        answer = self.server.post(path, json=body, headers=sent)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.fixture(scope="module")
def setup(clean: Server) -> Setup:
    for seed, name in enumerate((OLD, NEW), 1):
        small(clean.store / name, seed)
    return Setup(clean)


@pytest.fixture
def client(setup: Setup) -> Iterator[Any]:
    with triton.InferenceServerClient(setup.server.grpc_address) as client:
        yield client


def test_every_api_takes_an_alias_and_says_which_model_it_was(setup: Setup) -> None:
    """Every way to name a model: serving/api/test_naming.py."""
    wanted = setup.wanted
    answer = setup.post("/invocations", BODY, X_Amzn_SageMaker_Target_Model="시.tar.gz")
    assert (text(answer), unquote(answer.headers["x-served-model"])) == (wanted, OLD)
    named = {**COMPLETION, "model": "시"}
    answer = setup.post("/v1/completions", named)
    assert answer.json()["choices"][0]["text"] == wanted
    assert answer.json()["model"] == OLD
    *streamed, _ = events(setup.post("/v1/completions", {**named, "stream": True}))
    chunks = [json.loads(event) for event in streamed]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted
    assert {chunk["model"] for chunk in chunks} == {OLD}
    answer = setup.post("/v2/models/시/generate", {"text_input": "나는 오늘", "max_tokens": TOKENS})
    assert answer.json() == {"model_name": OLD, "model_version": "1", "text_output": wanted}
    tgi = {"max_new_tokens": TOKENS, "details": True, "adapter_id": "시"}
    answer = setup.post("/generate", {"inputs": "나는 오늘", "parameters": tgi})
    assert answer.json()["generated_text"] == wanted
    assert setup.post("/tokenize", {"model": "시", "prompt": "나는 오늘"}).json()["tokens"]
    lines = setup.server.text().splitlines()
    told = [json.loads(line) for line in lines if '"alias": "시"' in line]
    assert {line["model"] for line in told} == {OLD}


def test_grpc_takes_an_alias_whole_and_in_a_stream(setup: Setup, client: Any) -> None:
    wanted = setup.wanted
    parameters = {"max_new_tokens": TOKENS}
    answer = client.infer("시", [prompt()], parameters=parameters)
    assert (answer.get_response().model_name, generated(answer)) == (OLD, wanted)
    stream = Stream(client)
    stream.ask("시", **parameters)
    result, _ = stream.next()
    assert result.get_response().model_name == OLD
    assert generated(result) + "".join(stream.texts(1)[""]) == wanted
    assert client.is_model_ready("시")
    (entry,) = (m for m in client.get_model_repository_index().models if m.name == "상담")
    assert entry.reason == f"an alias of {OLD} (3), {NEW} (1)"
    status, said = refused(lambda: client.unload_model("시"))
    assert (status, said) == ("ABORTED", f"시 is an alias in aliases.json: name the model, {OLD}")


def test_one_user_stays_with_one_model_on_all_apis(setup: Setup, client: Any) -> None:
    models = set()
    for user in ("손님-1", "손님-2", "손님-3", "손님-4", "손님-5", "손님-6", "손님-7", "손님-8"):
        session = {"x-session-id": user.encode()}
        answer = setup.server.post("/predictions/상담", json=BODY, headers=session)
        model = unquote(answer.headers["x-served-model"])
        body = {**COMPLETION, "model": "상담", "user": user}
        for path in ("/v1/completions", "/predictions/상담"):
            assert setup.post(path, body).json()["model"] == model
        ascii_user = "guest-" + user[-1]
        by_header = setup.post("/predictions/상담", BODY, X_Session_Id=ascii_user)
        by_grpc = client.infer("상담", [prompt()], headers={"x-session-id": ascii_user})
        served = unquote(by_header.headers["x-served-model"])
        assert by_grpc.get_response().model_name == served
        models |= {model, served}
    assert models == {OLD, NEW}


def test_the_command_lists_aliases(setup: Setup) -> None:
    told = run("models", "--url", setup.server.management("")).stdout
    assert re.search(rf"^상담 +alias of {OLD}, {NEW}$", told, re.MULTILINE)
