"""Each field of a request is taken as OpenAI's specification has it, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest
from serving.api.openai import parsing
from serving.api.openai.errors import Refused, error_body
from serving.api.openai.parsing import ParsedRequest

COMPLETION = {"model": "봄", "prompt": "나는 오늘"}
CHAT = {"model": "봄", "messages": [{"role": "user", "content": "안녕?"}]}
TOOLS = [{"type": "function", "function": {"name": "time"}}]
CALL = {"tools": TOOLS, "tool_choice": "required"}


def completion(**more: Any) -> ParsedRequest:
    return parsing.completion({**COMPLETION, **more})


def chat(**more: Any) -> ParsedRequest:
    return parsing.chat({**CHAT, **more})


def refused(ask: Any, **more: Any) -> dict[str, Any]:
    with pytest.raises((Refused, InvalidRequest)) as caught:
        ask(**more)
    found: dict[str, Any] = error_body(caught.value)["error"]
    assert found["type"] == "invalid_request_error"
    assert str(found["param"]) in found["message"]
    return found


def test_the_defaults_are_openais() -> None:
    drawn = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "num_return_sequences": 1}
    assert completion().parameters == {**drawn, "max_new_tokens": 16}
    assert chat().parameters == {**drawn, "max_new_tokens": parsing.MAX_TOKENS}
    nothing = dict.fromkeys((*parsing.COMPLETION, *parsing.WITHOUT_EFFECT))
    assert parsing.completion({**nothing, **COMPLETION}) == completion()
    nothing = dict.fromkeys((*parsing.CHAT, *parsing.WITHOUT_EFFECT))
    assert parsing.chat({**nothing, **CHAT}) == chat()


def test_every_field_has_its_meaning() -> None:
    shared: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": "끝", "seed": 7, "stream": True,
        "frequency_penalty": -2, "presence_penalty": 1.5, "logit_bias": {"5": -100},
        "stream_options": {"include_usage": True}, "top_k": 40, "repetition_penalty": 1.2,
        "min_p": 0.1, "ignore_eos": True, "typical_p": 0.9, "no_repeat_ngram_size": 3,
        "min_tokens": 2, "bad_words": "욕", "bad_words_ids": [[5, 6]], "dry_multiplier": 0.8,
        "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 9,
        "dry_sequence_breakers": ["\n"],
    }  # fmt: skip
    parameters = {
        "do_sample": True, "temperature": 0.5, "top_p": 0.9, "num_return_sequences": 2,
        "stop": ("끝",), "seed": 7, "frequency_penalty": -2.0, "presence_penalty": 1.5,
        "logit_bias": {"5": -100}, "top_k": 40, "repetition_penalty": 1.2, "min_p": 0.1,
        "ignore_eos": True, "typical_p": 0.9, "no_repeat_ngram_size": 3,
        "min_new_tokens": 2, "bad_words": ("욕",), "bad_words_ids": ((5, 6),),
        "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 9,
        "dry_sequence_breakers": ("\n",),
    }  # fmt: skip
    found = completion(**shared, max_tokens=5, logprobs=0, user="나")
    assert found.parameters == {**parameters, "max_new_tokens": 5, "logprobs": 0}
    assert (found.n, found.logprobs, found.stream) == (2, True, True)
    assert found.include_usage
    found = chat(**shared, max_completion_tokens=6, max_tokens=5, logprobs=True, top_logprobs=4)
    assert found.parameters == {**parameters, "max_new_tokens": 6, "logprobs": 4}


def test_a_temperature_or_top_p_of_0_is_greedy() -> None:
    for greedy in ({"temperature": 0}, {"top_p": 0, "temperature": 2}):
        assert completion(**greedy).parameters["do_sample"] is False
        found = completion(**greedy, n=3).parameters
        assert (found["do_sample"], found["top_k"], found["num_return_sequences"]) == (True, 1, 3)


def test_an_echo_needs_the_prompts_tokens_where_their_text_or_logprobs_are_not_known() -> None:
    assert "decoder_input_details" not in completion(echo=True).parameters
    for more in ({"prompt": [5, 6]}, {"logprobs": 0}):
        assert completion(echo=True, **more).parameters["decoder_input_details"] is True
    found = completion(echo=True, max_tokens=0)
    assert (found.only_echo, found.parameters["max_new_tokens"]) == (True, 1)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_of_64_bits_becomes_one_of_the_engines(seed: int) -> None:
    assert 0 <= completion(seed=seed).parameters["seed"] < 2**63


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("가", ["가"]),
        ("", [""]),
        (["가", "나"], ["가", "나"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_texts_or_ids(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, 1, {}, [], [[]], ["가", None], [1.5], [True], ["가"] * 65, "\0", [1] * 50_001]
)
def test_another_prompt_is_refused(prompt: Any) -> None:
    assert refused(completion, prompt=prompt)["param"] == "prompt"


def test_messages_become_texts_with_roles_that_templates_know() -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "짧게"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in "가나"]},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "user", "content": "다", "name": "소월"},
    ]
    assert chat(messages=messages).prompts == [
        [
            {"role": "system", "content": "짧게"},
            {"role": "user", "content": "가\n나"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "다", "name": "소월"},
        ]
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("안녕", "messages[1]"),
        ({"content": "안녕"}, "messages[1].role"),
        ({"role": "tool", "content": "안녕", "tool_call_id": "1"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 1}, "messages[1].content"),
        ({"role": "user", "content": "\0"}, "messages[1].content"),
        ({"role": "user", "content": ["안녕"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
    ],
)
def test_a_message_that_cannot_be_said_to_a_model_is_refused(message: Any, param: str) -> None:
    assert refused(chat, messages=[CHAT["messages"][0], message])["param"] == param  # type: ignore


WRONG: dict[str, list[Any]] = {
    "model": [None, 3],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "temperature": [2.1, "1", float("nan")],
    "top_p": [-0.1],
    "n": [0, 17, True],
    "stop": [1, [""], ["가"] * 17],
    "seed": [2**63],
    "frequency_penalty": [2.5],
    "presence_penalty": ["1"],
    "logit_bias": [[5], {"가": 1}, {"5": 101}],
    "max_tokens": [0],
    "repeat_penalty": [0],
    "guided_choice": ["가"],
    "온도": [1],
}


@pytest.mark.parametrize("field", WRONG)
@pytest.mark.parametrize("ask", [completion, chat])
def test_a_wrong_field_is_named(ask: Any, field: str) -> None:
    for value in WRONG[field]:
        assert refused(ask, **{field: value})["param"] == field


@pytest.mark.parametrize(
    ("ask", "more", "param"),
    [
        (completion, {"n": 3, "best_of": 2}, "best_of"),
        (completion, {"best_of": 2, "stream": True}, "best_of"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"echo": 1}, "echo"),
        (completion, {"suffix": "끝"}, "suffix"),
        (completion, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (completion, {"max_completion_tokens": 1}, "max_completion_tokens"),
        (chat, {"logprobs": 1}, "logprobs"),
        (chat, {"top_logprobs": 1}, "top_logprobs"),
        (chat, {"functions": [{"name": "time"}]}, "functions"),
        (chat, {"function_call": {"name": "time"}}, "function_call"),
        (chat, {**CALL, "regex": "가"}, "tools[0].function.parameters"),
        (chat, {"modalities": ["text", "audio"]}, "modalities"),
        (chat, {"reasoning_effort": "high"}, "reasoning_effort"),
        (chat, {"web_search_options": {}}, "web_search_options"),
        (chat, {"prompt": "가"}, "prompt"),
        *((chat, {"messages": messages}, "messages") for messages in (None, [], "안녕", {})),
    ],
)
def test_what_cannot_be_had_is_refused(ask: Any, more: dict[str, Any], param: str) -> None:
    assert refused(ask, **more)["param"] == param


def test_what_asks_for_nothing_is_taken() -> None:
    harmless: dict[str, Any] = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
        "modalities": ["text"], "store": False, "metadata": {"a": "b"}, "service_tier": "auto",
        "parallel_tool_calls": True, "user": "소월", "reasoning_effort": "none",
    }  # fmt: skip
    assert chat(**harmless) == chat()
    same = completion(suffix="", user="소월", response_format={"type": "text"})
    assert same == completion()


def test_other_servers_names_and_values_are_taken() -> None:
    for ask in (completion, chat):
        assert ask(repeat_penalty=1.3).parameters["repetition_penalty"] == 1.3
        assert ask(top_k=-1).parameters["top_k"] == 0
        assert ask(max_tokens=3.0) == ask(max_tokens=3)
        options = {"include_usage": True, "continuous_usage_stats": True}
        assert ask(stream=True, stream_options=options).continuous_usage


def test_a_refusal_says_what_is_known() -> None:
    message = refused(completion, 온도=1)["message"]
    assert "known are bad_words, bad_words_ids, best_of, choice, choice_logprobs, dry" in message
    assert "tools" not in message
    message = refused(chat, stream=True, stream_options={"x": 1})["message"]
    assert "known are include_usage, continuous_usage_stats" in message
    message = refused(chat, messages=[{"role": "tool", "content": "맑음"}])["message"]
    assert "say what was called" in message


@pytest.mark.parametrize("ask", [completion, chat])
def test_a_form_is_one_of_the_engines_parameters(ask: Any) -> None:
    found = ask(response_format={"type": "json_object"}, guided_decoding_backend="xgrammar")
    assert found.parameters["json_schema"] == {"type": "object"}
    assert found.form.field == "response_format"
    assert ask(choice=[]).parameters["choice"] == []  # in place of the model's own
    assert "guided_json" in refused(ask, guided_json={}, guided_regex="가")["message"]


def test_a_call_is_one_of_its_arguments_schema() -> None:
    found = chat(**CALL)
    assert found.parameters["json_schema"]["additionalProperties"] is False
    assert found.tool_choice is not None
    assert chat(tools=TOOLS, tool_choice="none") == chat()
