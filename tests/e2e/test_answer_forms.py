"""Answers that are held to a form, as programs get them that were made for OpenAI, vLLM, llama.cpp,
TGI and Triton: nothing is changed in them but the address. instructor, PydanticAI and outlines make
the same calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from tests.e2e.console import blocks, ran
from tests.e2e.server import REPOSITORY, Server
from tests.e2e.test_openai import TEMPLATE, checked, connected
from tests.engine.hugging_face import make_hugging_face
from tests.lazy import openai
from tests.serving.store.archives import unpack

MODEL, LABELS = "my-chat", "감정"  # the first as docs/api/openai.md calls it
MESSAGES: list[Any] = [{"role": "user", "content": "오늘은 날씨가 좋다."}]
PROMPT = "오늘은 날씨가"


class Poet(BaseModel):
    name: str = Field(max_length=6)
    year: int = Field(ge=1900, le=1999)


class Review(BaseModel):
    sentiment: Literal["긍정", "부정"]
    certain: bool
    poets: list[Poet] = Field(min_length=1, max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {  # with bounds: else a drawn number goes on for all of max_tokens now and then
        "감정": {"enum": ["긍정", "부정"]},
        "점수": {"type": "integer", "minimum": -5, "maximum": 5},
    },
    "required": ["감정", "점수"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["서울", "부산"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time"}},
]
CALL: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 1}


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    unpack(REPOSITORY / "model_store" / "sowol.tar.gz", clean.store / MODEL)
    unpack(REPOSITORY / "model_store" / "sowol.tar.gz", clean.store / "sowol")
    (clean.store / MODEL / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    path, config = clean.store / LABELS, {"chat_template": TEMPLATE}
    make_hugging_face(path, kind="byte-level", max_length=512, tokenizer_config=config)
    (labels,) = blocks(REPOSITORY / "docs" / "models" / "model-settings.md", "json")
    (path / "generation.json").write_text(labels, encoding="utf-8")
    return clean


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connected(server) as client:
        yield client


def post(server: Server, path: str, body: Any) -> Any:
    answer = server.post(path, json=body)
    assert answer.ok, answer.text
    return answer.json()


def fits(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["감정", "점수"] and found["감정"] in ("긍정", "부정")


# OpenAI's client and pydantic


def test_a_pydantic_model_is_what_a_chat_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**CALL, "response_format": Review}
    (choice,) = client.chat.completions.parse(**asked).choices
    assert isinstance(choice.message.parsed, Review)
    assert choice.finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == choice.message.parsed


def test_the_examples_of_the_page_run_on_the_demo_model_as_they_are_shown(server: Server) -> None:
    chat, form = blocks(REPOSITORY / "docs" / "api" / "openai.md", "python")
    ran(server, chat)  # a drawn text, which may be empty
    assert ran(server, form) in ("긍정\n", "부정\n")


def test_a_pydantic_model_is_what_a_response_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "좋다.", "max_output_tokens": 200}
    made = client.responses.parse(**asked, text_format=Review)
    assert isinstance(made.output_parsed, Review)
    assert made.text.format.type == "json_schema"
    with client.responses.stream(**asked, text_format=Review) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Review)
    found = client.responses.create(**asked, text={"format": {"type": "json_object"}})
    assert found.output_text.lstrip().startswith("{")
    found = client.responses.create(**asked, extra_body={"guided_choice": ["긍정", "부정"]})
    assert found.output_text in ("긍정", "부정")


# The other routes. Other servers' names for a form: serving/api/test_answer_form.py


def test_parameters_of_the_other_routes_are_forms(server: Server) -> None:
    asked = {"max_new_tokens": 100, "seed": 2}
    form = {"json_schema": SCHEMA}
    body: dict[str, Any] = {"inputs": PROMPT, "parameters": {**asked, **form}}
    assert fits(post(server, f"/predictions/{MODEL}", body)["generated_text"])
    body = {"text_input": PROMPT, **asked, "json_schema": json.dumps(SCHEMA)}
    assert fits(post(server, f"/v2/models/{MODEL}/generate", body)["text_output"])
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    for choice in (["긍정", "부정"], '["긍정", "부정"]'):
        body = {"inputs": [text], "parameters": {**asked, "choice": choice}}
        (made, *_) = post(server, f"/v2/models/{MODEL}/infer", body)["outputs"]
        assert made["data"][0] in ("긍정", "부정")


def test_a_models_own_labels_are_its_answers_until_a_request_wants_others(
    server: Server, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {**CALL, "model": LABELS}
    assert client.chat.completions.create(**asked).choices[0].message.content in ("긍정", "부정")
    extra = {"guided_regex": "산에는"}
    made = client.chat.completions.create(**asked, extra_body=extra)
    assert made.choices[0].message.content == "산에는"
    free = client.chat.completions.create(**asked, extra_body={"choice": []})
    assert free.choices[0].message.content not in ("긍정", "부정")


# Calls of functions


def arguments(name: str, text: str) -> bool:
    found = json.loads(text)
    if name == "time":
        return bool(found == {})
    return name == "weather" and found["city"] in ("서울", "부산") and found["days"] in (1, 2, 3)


def test_a_function_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    """Other choices and what is refused: serving/api/openai/test_tools.py."""
    asked: dict[str, Any] = {**CALL, "tools": TOOLS, "tool_choice": "required", "n": 3}
    made = checked(client.chat.completions.create(**asked))
    streamed: list[list[Any]] = [[], [], []]
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index].append(checked(chunk).choices[0])
    for one, chunks in zip(made.choices, streamed, strict=True):
        (call,) = one.message.tool_calls
        assert (one.message.content, one.finish_reason) == (None, "tool_calls")
        assert call.id.startswith("call_")
        assert arguments(call.function.name, call.function.arguments)
        begin, first, *pieces, last = chunks
        assert (begin.delta.role, begin.delta.content) == ("assistant", None)
        assert first.delta.tool_calls[0].function.name == call.function.name
        assert last.finish_reason == "tool_calls"
        text = "".join(p.delta.tool_calls[0].function.arguments for p in pieces)
        assert text == call.function.arguments


def test_a_classifier_tells_the_probability_of_each_label(
    server: Server, client: openai.OpenAI
) -> None:
    asked = {"choice": ["긍정", "부정", "중립"], "choice_logprobs": True}
    own = post(server, f"/predictions/{MODEL}", {"inputs": PROMPT, "parameters": asked})
    found = {one["text"]: one["logprob"] for one in own["choice_logprobs"]}
    assert set(found) == set(asked["choice"])  # type: ignore[call-overload]
    assert sum(np.exp(list(found.values()))) == pytest.approx(1, abs=1e-4)
    assert own["generated_text"] == max(found, key=lambda text: found[text])
    completion = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, extra_body=asked
    )
    (choice,) = completion.to_dict()["choices"]  # type: ignore[misc]
    assert choice["choice_logprobs"] == own["choice_logprobs"]
    *_, last = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, stream=True, extra_body=asked
    )
    told = last.to_dict()["choices"][0]["choice_logprobs"]  # type: ignore[index]
    assert {one["text"] for one in told} == set(found)
    refusal = server.post(
        f"/predictions/{MODEL}", json={"inputs": PROMPT, "parameters": {"choice_logprobs": True}}
    )
    assert refusal.status_code == 400
    assert "needs parameters.choice" in refusal.json()["message"]
