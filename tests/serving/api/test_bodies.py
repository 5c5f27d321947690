"""OpenAI's and TGI's bodies on the routes of SageMaker and Multi Model Server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.errors import EngineError, InvalidRequest
from serving.api import tgi
from serving.models.model import Model
from tests.serving.api.gateways import SAID as TEXT
from tests.serving.api.gateways import FakeEngine, World, model

MESSAGES = [{"role": "user", "content": "안녕?"}]
DONE = "[DONE]"
FIRST = {"index": 0, "token": 5, "text": TEXT, "prompt_tokens": 3, "cached_tokens": 0}


def world(*items: Any) -> World:
    return World(engine=FakeEngine(streamed=items))


def call(made: World, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """The status and the answer, which is a list of its events where it is a stream."""
    status, found, answer = asyncio.run(made.call("POST", path, body, **headers))
    assert (made.gateway.requests, made.model.in_flight, made.model.line.running) == (0, 0, 0)
    if found["content-type"] == "application/json":
        return status, json.loads(answer)
    assert found["content-type"] == "text/event-stream; charset=utf-8"
    events = [event.removeprefix("data: ") for event in answer.decode().split("\n\n")[:-1]]
    return status, [event if event == DONE else json.loads(event) for event in events]


ROUTES = ["/models/봄/invoke", "/predictions/봄", "/invocations?model_name=봄"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_of_openais_is_answered_as_on_openais_routes(path: str) -> None:
    made = world(FIRST, {"index": 0, "token": 1, "text": "", "finish_reason": "stop"})
    status, found = call(made, path, {"messages": MESSAGES, "max_tokens": 5})
    assert (status, found["object"], found["model"]) == (200, "chat.completion", "봄")
    assert found["choices"][0]["message"]["content"] == TEXT
    name, inputs, parameters, _, kind = made.engine.asked[0]
    assert (name, inputs, kind) == (made.model.engine_name, MESSAGES, "messages")
    assert (parameters["max_new_tokens"], parameters["do_sample"]) == (5, True)

    _, found = call(made, path, {"prompt": ["나 보기가", "산에는"], "temperature": 0})
    assert [choice["text"] for choice in found["choices"]] == [TEXT, TEXT]
    assert [(kind, prompt) for _, prompt, _, _, kind in made.engine.asked[1:]] == [
        ("prompt", "나 보기가"),
        ("prompt", "산에는"),
    ]

    status, (*chunks, done) = call(made, path, {"messages": MESSAGES, "stream": True})
    assert (status, done) == (200, DONE)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == TEXT

    status, answer = call(made, path, {"messages": MESSAGES, "온도": 1})
    assert (status, answer["error"]["param"]) == (400, "온도")


@pytest.mark.parametrize(
    "body", [{"inputs": "messages"}, {"inputs": "가", "prompt": "나"}, ["messages"], "prompt"]
)
def test_other_bodies_and_other_models_are_their_workers_matter(body: Any) -> None:
    made = world()
    assert call(made, ROUTES[0], body)[0] == 200
    assert len(made.mms.told_s) == 1
    made.model.in_engine = False
    assert call(made, ROUTES[0], {"messages": MESSAGES})[1] == {"generated_text": TEXT}
    assert made.engine.asked == []


def test_where_nothing_names_the_model_all_ways_are_said() -> None:
    for body in ({"inputs": "가"}, {"messages": MESSAGES}, {"messages": MESSAGES, "model": 1}):
        status, answer = call(world(), "/invocations", body)
        assert status == 400
        error = answer["error"] if "messages" in body else answer
        assert "CustomAttributes model=NAME" in error["message"]


NOT_THERE = "Model not found: 겨울"
NO_SESSIONS = "no stateful sessions"


@pytest.mark.parametrize(
    ("path", "headers", "status", "words"),
    [
        ("/invocations?model_name=겨울", {}, 404, NOT_THERE),
        ("/predictions/겨울", {}, 404, NOT_THERE),
        ("/invocations?model_name=봄", {"x_amzn_sagemaker_session_id": "가"}, 400, NO_SESSIONS),
    ],
)
def test_an_error_before_the_model_is_in_the_format_of_the_bodys_api(
    path: str, headers: dict[str, str], status: int, words: str
) -> None:
    for body in ({"messages": MESSAGES}, {"prompt": "산에는"}):
        found, answer = call(world(), path, body, **headers)
        assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
        assert words in answer["error"]["message"]
    body_of_tgi = {"inputs": "산에는", "parameters": {"details": True}}
    found, answer = call(world(), path, body_of_tgi, **headers)
    assert (found, answer["error_type"]) == (status, "validation")
    assert words in answer["error"]
    found, answer = call(world(), path, {"inputs": "산에는"}, **headers)
    assert (found, answer["code"], words in answer["message"]) == (status, status, True)


OPEN, CLOSE = (
    b'{"requestType": "NEW_SESSION"}',
    b'{"requestType": "CLOSE", "inputs": "\xea\xb0\x80"}',
)


@pytest.mark.parametrize(
    ("path", "body", "headers", "refused"),
    [
        ("/invocations", OPEN, {}, True),
        ("/invocations", OPEN, {"content-type": ""}, True),  # a body without a type is JSON
        ("/invocations", CLOSE, {"x_amzn_sagemaker_session_id": "가"}, True),
        ("/invocations", b'"text"', {"x_amzn_sagemaker_session_id": "NEW_SESSION"}, True),
        ("/invocations", b'{"requestType": "of a script"}', {}, False),
        ("/invocations", b'{"requestType": ["CLOSE"]}', {}, False),
        ("/invocations", b'["requestType"]', {}, False),
        ("/invocations", b'{"inputs": {"requestType": "CLOSE"}}', {}, False),
        ("/invocations", b'{"requestType": "CLOSE"', {}, False),
        ("/invocations", OPEN, {"content-type": "text/plain"}, False),
        ("/predictions/봄", OPEN, {}, False),
    ],
)
async def test_a_session_of_sagemaker_is_refused_before_any_model_is_called(
    path: str, body: bytes, headers: dict[str, str], refused: bool
) -> None:
    made = world()
    made.gateway.single_model = "봄"
    status, _, answer = await made.call("POST", path, body, **headers)
    assert (status, len(made.mms.told_s)) == ((400, 0) if refused else (200, 1))
    assert (NO_SESSIONS in answer.decode()) == refused


def test_a_model_of_its_own_code_has_no_format_of_another_api() -> None:
    made = world()
    made.model.in_engine, made.model.line.max_waiting = False, 0
    made.model.line.running = made.model.line.capacity

    async def refused() -> dict[str, Any]:
        _, _, answer = await made.call("POST", ROUTES[0], {"messages": MESSAGES})
        found: dict[str, Any] = json.loads(answer)
        return found

    assert asyncio.run(refused())["type"] == "TooManyRequestsException"


# TGI's


def step(token: int, text: str, **more: Any) -> dict[str, Any]:
    return {"token": token, "text": text, "logprob": -0.5, "top": [], **more}


def items(*texts: str, end: str, special: bool) -> list[dict[str, Any]]:
    made = [
        {"index": 0, "token": i, "text": text, "logprobs": step(i, text)}
        for i, text in enumerate(texts)
    ]
    last = step(9, "</s>", special=True) if special else step(9, "끝")
    made.append({"index": 0, "token": 9, "text": "", "logprobs": last, "finish_reason": end})
    made[0] |= {"prompt_tokens": 3, "cached_tokens": 0}
    return made


@pytest.mark.parametrize(
    ("end", "special", "reason"),
    [
        ("stop", True, "eos_token"),
        ("stop", False, "stop_sequence"),
        ("length", False, "length"),
    ],
)
def test_how_an_answer_ended_is_said_in_tgis_words(end: str, special: bool, reason: str) -> None:
    made = world(*items("가", " 나", end=end, special=special))
    _, found = call(made, ROUTES[0], {"inputs": "산에는", "parameters": {"details": True}})
    assert found["generated_text"] == "가 나"
    assert found["details"]["finish_reason"] == reason
    assert [token["special"] for token in found["details"]["tokens"]] == [False, False, special]


def test_text_that_waited_for_the_end_token_is_no_special_one() -> None:
    """A client leaves out the text of special tokens."""
    text = tgi.Text(tgi.parse({"inputs": "가", "parameters": {"details": True}}))
    last = {"text": "끝", "logprobs": step(1, "</s>", special=True), "finish_reason": "stop"}
    assert text.add(last)["token"] == {"id": 1, "text": "끝", "logprob": -0.5, "special": False}


def test_a_stream_of_tgis_that_breaks_off_says_so_in_its_words() -> None:
    first, *_ = items("가", end="stop", special=True)
    made = world(first, EngineError("a step failed"))
    body = {"inputs": "산에는", "parameters": {"details": False}, "stream": True}
    status, (*_, last) = call(made, ROUTES[0], body)
    assert (status, last) == (200, {"error": "a step failed", "error_type": "generation"})


def test_a_newer_client_of_hugging_faces_is_known_by_its_name() -> None:
    body = {"inputs": "산에는", "stream": True}
    agent = {"user_agent": "unknown/None; hf_hub/1.33.0; python/3.12.1"}
    for headers, kind in ((agent, dict), ({}, int)):
        made = world(*items("가", end="length", special=False))
        _, (first, *_) = call(made, ROUTES[0], body, **headers)
        assert type(first["token"]) is kind


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({"do_sample": False, "stop": [], "return_full_text": False}, {"do_sample": False}),
        ({"do_sample": False, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False, "seed": 1}, {"do_sample": False, "seed": 1}),
        ({"top_n_tokens": 3, "best_of": 1, "watermark": False}, {}),
        ({"do_sample": False, "typical_p": 0.9}, {"typical_p": 0.9}),
        ({"grammar": {"type": "regex", "value": "긍정|부정"}}, {"regex": "긍정|부정"}),
    ],
)
def test_the_clients_defaults_mean_what_they_mean_to_tgi(parameters: Any, sent: Any) -> None:
    body = {"inputs": "가", "parameters": {**parameters, "details": False}}
    found = {k: v for k, v in tgi.parse(body).parameters.items() if k != "return_full_text"}
    assert found == {**sent, "logprobs": parameters.get("top_n_tokens", 0)}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"grammar": {}}, "parameters.grammar.type must be"),
        ({"grammar": {"type": "regex"}}, "parameters.grammar.value must be text"),
        (
            {"grammar": {"type": "regex", "value": "가"}, "choice": ["가"]},
            "parameters.choice and parameters.grammar are given",
        ),
        ({"best_of": 2}, "/v1/completions has it"),
        ({"details": "yes"}, "parameters.details must be true or false"),
        ({"logprobs": "3"}, "parameters.logprobs must be an integer"),
        ({"top_n_tokens": 21}, "parameters.top_n_tokens must be from 0 to 20"),
        ({"온도": 1}, "parameters.온도 is not known"),
        ({"adapter_id": 1}, "parameters.adapter_id must be a model's name"),
        ({"num_return_sequences": 2, "seed": 1}, "parameters.num_return_sequences must be 1"),
    ],
)
def test_what_cannot_be_had_is_refused_in_tgis_words(more: Any, said: str) -> None:
    made = world()
    body = {"inputs": "가", "parameters": {"details": True, **more}}
    status, found = call(made, ROUTES[0], body)
    assert (status, found["error_type"]) == (400, "validation")
    assert said in found["error"]
    assert made.engine.asked == []


def two_models() -> tuple[World, Model]:
    """The base of the route, and an adapter."""
    made = world(*items("가", end="length", special=False))
    return made, made.add(model("여름/시"), in_engine=True)


@pytest.mark.parametrize(
    "path",
    ["/predictions/봄", "/invocations?model_name=봄", "/generate", "/generate?model_name=봄"],
)
def test_tgis_adapter_id_is_the_model_that_answers(path: str) -> None:
    made, adapter = two_models()
    body = {"inputs": "산에는", "parameters": {"adapter_id": "여름/시", "do_sample": False}}
    assert call(made, path, body) == (200, {"generated_text": "가"})
    assert [name for name, *_ in made.engine.asked] == [adapter.engine_name]
    assert (adapter.in_flight, adapter.line.running) == (0, 0)
    assert set(made.gateway.metrics.tallies) == {adapter.name}


def test_tgis_own_routes_are_a_text_and_a_stream_and_say_what_they_lack() -> None:
    made, _ = two_models()
    body: Any = {"inputs": "산에는", "parameters": {"adapter_id": "봄"}, "stream": True}
    assert call(made, "/generate", body) == (200, {"generated_text": "가"})
    status, events = call(made, "/generate_stream", {**body, "stream": False})
    assert (status, events[-1]["generated_text"]) == (200, "가")
    lacking = ({"inputs": "가"}, "parameters.adapter_id"), ({"prompt": "가"}, "inputs")
    for body, said in (*lacking, ("가", "inputs")):
        status, found = call(made, "/generate", body)
        assert (status, found["error_type"]) == (400, "validation")
        assert said in found["error"]


def test_tgis_parameters_are_an_object_or_null() -> None:
    made = world(*items("가", end="length", special=False))
    path, body = "/generate?model_name=봄", {"inputs": "산에는"}
    assert call(made, path, {**body, "parameters": None}) == (200, {"generated_text": "가"})
    status, found = call(made, path, {**body, "parameters": [1]})
    assert (status, found["error"]) == (400, "parameters must be an object, is a list")


@pytest.mark.parametrize("path", ["/predictions/봄", "/generate", "/generate_stream"])
def test_an_adapter_that_there_is_not_is_a_404_of_tgis(path: str) -> None:
    made, _ = two_models()
    status, found = call(made, path, {"inputs": "산에는", "parameters": {"adapter_id": "겨울"}})
    assert (status, found["error_type"]) == (404, "validation")
    assert (found["error"], made.engine.asked) == ("Model not found: 겨울", [])


def test_a_model_of_its_own_code_is_no_adapter() -> None:
    made, adapter = two_models()
    adapter.in_engine = False
    body = {"inputs": "가", "parameters": {"adapter_id": adapter.name}}
    status, answer = call(made, ROUTES[0], body)
    assert (status, "by its own code" in answer["error"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {"inputs": "가", "parameters": {"grammar": {"type": "regex", "value": "("}}},
            "parameters.grammar",
        ),
        (
            {"prompt": "가", "structured_outputs": {"regex": "("}, "logprobs": 0},
            "structured_outputs.regex",
        ),
    ],
)
def test_what_is_wrong_with_a_form_is_said_by_the_clients_name(body: Any, field: str) -> None:
    refused = InvalidRequest("parameters.regex: unclosed group")
    first, *_ = items("가", end="stop", special=True)
    whole = call(world(refused), ROUTES[0], body)
    at_once = call(world(refused), ROUTES[0], {**body, "stream": True})
    status, (*_, last) = call(world(first, refused), ROUTES[0], {**body, "stream": True})
    for found, answer in (whole, at_once, (400, last)):
        error = answer["error"]
        message = error if isinstance(error, str) else error["message"]
        assert (found, message) == (400, f"{field}: unclosed group")
        assert isinstance(error, str) or error["param"] == field
    assert status == 200  # of what breaks off in the middle
