"""Triton's generate routes, as its LLM backends' quick starts use them."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
import requests
from onnx import TensorProto

from tests.e2e.server import Server
from tests.e2e.stores import events, small, text
from tests.handlers.tensors.graphs import identity

PROMPT = "나는 오늘"
ASKED = {"text_input": PROMPT, "max_tokens": 9}


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    small(clean.store / "spring", 1)
    identity(clean.store / "texts" / "model.onnx", TensorProto.STRING, ["n"])
    return clean


def post(server: Server, name: str, route: str, body: Any) -> requests.Response:
    """As curl sends it: no content type that says JSON."""
    return server.post(f"/v2/models/{quote(name)}/{route}", data=json.dumps(body).encode())


def generate(server: Server, **more: Any) -> Any:
    return post(server, "spring", "generate", {**ASKED, **more}).json()["text_output"]


def test_a_text_is_generated_as_the_servers_own_route_does_it(server: Server) -> None:
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 16}}
    wanted = text(server.predict("spring", asked))
    body = {"id": "요청 1", "text_input": PROMPT, "parameters": {"max_tokens": 16}}
    head = {"id": "요청 1", "model_name": "spring", "model_version": "1"}
    for path in ("generate", "versions/1/generate"):
        answer = post(server, "spring", path, body)
        assert answer.json() == {**head, "text_output": wanted}
    beside = {"text_input": PROMPT, "max_new_tokens": 16, "exclude_input_in_output": False}
    assert post(server, "spring", "generate", beside).json()["text_output"] == PROMPT + wanted
    assert len(generate(server, num_return_sequences=3, seed=4)) == 3


@pytest.mark.parametrize(
    "more",
    [
        {"bad_words": "", "stop_words": ""},  # TensorRT-LLM's
        {"bad_words": [], "stop_words": [], "timeout": 60_000_000, "priority": 0},
        {"parameters": {"stream": False, "exclude_input_in_output": True}},  # vLLM's
        {"text_input": [PROMPT], "stream": False},
    ],
)
def test_the_quick_starts_of_llm_backends_are_answered(
    server: Server, more: dict[str, Any]
) -> None:
    assert generate(server, **more) == generate(server)


def test_stop_words_end_a_text(server: Server) -> None:
    whole = generate(server)
    for words in (whole[4:6], [whole[4:6]]):
        assert generate(server, stop_words=words) == whole[: whole.index(whole[4:6])]


@pytest.mark.parametrize(
    ("route", "more", "is_cut"),
    [
        ("generate", {"stream": True}, True),
        ("generate_stream", {"stream": True, "exclude_input_in_output": False}, True),
        ("generate_stream", {"parameters": {"stream": False}}, False),
    ],
)
def test_a_stream_is_the_text_in_events(
    server: Server, route: str, more: dict[str, Any], is_cut: bool
) -> None:
    wanted = ("exclude_input_in_output" in more) * PROMPT + generate(server)
    values = [json.loads(e) for e in events(post(server, "spring", route, {**ASKED, **more}))]
    assert "".join(value["text_output"] for value in values) == wanted
    assert (len(values) > 1) == is_cut
    assert set(values[0]) == {"model_name", "model_version", "text_output"}


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("generate", {}, 400, "text_input"),
        ("generate", {"text_input": 1}, 400, "text_input"),
        ("generate", {"text_input": PROMPT, "id": 1}, 400, "id must be"),
        ("generate", {"text_input": PROMPT, "온도": 1}, 400, "온도 is not known"),
        ("generate", {"text_input": PROMPT, "parameters": [1]}, 400, "parameters"),
        ("generate", {"text_input": [PROMPT, PROMPT]}, 400, "text_input"),
        ("generate", {"text_input": PROMPT, "stream": "아니"}, 400, "stream must be"),
        ("generate", {"text_input": PROMPT, "bad_words": [1]}, 400, "bad_words must be a string"),
        ("generate", {"text_input": PROMPT, "stop_words": [1]}, 400, "stop"),
        ("generate_stream", {"text_input": PROMPT, "parameters": {"top_p": 2}}, 400, "top_p"),
        ("generate_stream", {**ASKED, "num_return_sequences": 2, "seed": 1}, 400, "one"),
        ("generate", [], 400, "must be a JSON object"),
        ("generate_stream", {"text_input": "가" * 3000}, 413, "context"),
        ("versions/7/generate", {"text_input": PROMPT}, 404, "version"),
        ("trace/setting", {}, 404, "no traces here"),
    ],
)
def test_what_is_wrong_is_said_in_the_protocols_shape(
    server: Server, route: str, body: Any, status: int, said: str
) -> None:
    answer = post(server, "spring", route, body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert said in answer.json()["error"]


def test_a_model_of_tensors_generates_no_text(server: Server) -> None:
    answer = post(server, "texts", "generate", {"text_input": PROMPT})
    assert (answer.status_code, set(answer.json())) == (400, {"error"})
    assert "/predictions/texts" in answer.json()["error"]
