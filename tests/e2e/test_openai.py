"""OpenAI's own client against a server, as Open WebUI or LiteLLM would be pointed at it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.e2e.server import Server
from tests.e2e.stores import events, greedy, small
from tests.engine.hugging_face import make_hugging_face, write_json
from tests.lazy import openai

if TYPE_CHECKING:
    from openai.types import Completion, Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response

PROMPT = "나는 오늘"
TEMPLATE = (
    "{% for m in messages %}{{ '<usr>' if m.role == 'user' else '<sys>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<sys>{% endif %}"
)
CHAT: list[Any] = [
    {"role": "developer", "content": "짧게 답한다."},
    {"role": "user", "content": [{"type": "text", "text": "안녕?"}]},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    store = clean.store
    small(store / "시" / "봄", 1)
    small(store / "여름", 2)
    make_hugging_face(store / "채팅", tokenizer_config={"chat_template": TEMPLATE})
    write_json(small(store / "한마디", 3) / "generation.json", {"template": "<usr>{글}<sys>"})
    return clean


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connected(server) as client:
        yield client


def connected(server: Server, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url("/v1"), api_key=key, timeout=60, max_retries=0)


def checked(found: BaseModel) -> Any:
    """Field by field what the client's types, made from OpenAI's specification, say: each there is
    in its type, and no other."""

    def no_more(value: Any) -> None:
        if isinstance(value, BaseModel):
            assert not value.model_extra, (type(value), value.model_extra)
            for name in type(value).model_fields:
                no_more(getattr(value, name))
        elif isinstance(value, list):
            for one in value:
                no_more(one)

    type(found).model_validate(json.loads(found.model_dump_json()), strict=False)
    no_more(found)
    return found


def refused(call: Any) -> Any:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    error = caught.value
    assert set(error.response.json()["error"]) == {"message", "type", "param", "code"}
    assert error.request_id
    return error


# Models


def test_a_client_lists_what_the_store_has(client: openai.OpenAI) -> None:
    found = {model.id for model in client.models.list()}
    assert found == {"시/봄", "여름", "채팅", "한마디"}
    model: Model = checked(client.models.retrieve("여름"))
    assert (model.id, model.object) == ("여름", "model")


def test_a_model_that_is_not_there_is_a_404_of_openais(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.models.retrieve("없음"),
        lambda: client.completions.create(model="없음", prompt=PROMPT),
    ):
        error = refused(call)
        assert isinstance(error, openai.NotFoundError)
        assert (error.code, error.type) == ("model_not_found", "invalid_request_error")
        assert "없음" in error.message


# Completions


def test_a_completion_loads_its_model_and_gives_its_text(
    server: Server, client: openai.OpenAI
) -> None:
    found = client.completions.create(model="시/봄", prompt=PROMPT, temperature=0)
    made: Completion = checked(found)
    (choice,) = made.choices
    assert choice.text == greedy(server, "시/봄")  # 16 tokens, OpenAI's default
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (made.object, made.model, made.id[:5]) == ("text_completion", "시/봄", "cmpl-")
    assert made.usage.completion_tokens == 16
    assert made.usage.total_tokens == made.usage.prompt_tokens + 16


@pytest.fixture
def complete(client: openai.OpenAI) -> Any:
    """A completion of 여름."""
    return functools.partial(client.completions.create, model="여름", prompt=PROMPT)


def texts(made: Completion) -> list[str]:
    return [choice.text for choice in made.choices]


def test_texts_and_ids_n_of_each_in_their_order(complete: Any) -> None:
    prompts, drawn = [PROMPT, "산에는"], {"n": 2, "seed": 5}
    both = complete(prompt=prompts, **drawn)
    alone = [texts(complete(prompt=prompt, **drawn)) for prompt in prompts]
    assert texts(both) == [text for some in alone for text in some]
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for chunk in complete(prompt=prompts, stream=True, **drawn):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts(both)

    ids = [5, 9, 30, 12]
    one, two = complete(prompt=ids, **GREEDY), complete(prompt=[ids, ids[:3]], **GREEDY)
    assert texts(one) == texts(two)[:1]
    assert (one.usage.prompt_tokens, two.usage.prompt_tokens) == (4, 7)
    assert texts(complete(prompt=ids, n=3, **GREEDY)) == texts(one) * 3


def test_a_stream_of_a_completion_is_its_text(server: Server, complete: Any) -> None:
    options = {"include_usage": True}
    *chunks, last = complete(stream=True, stream_options=options, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(server, "여름")
    assert {chunk.id for chunk in chunks} == {last.id}
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 16
    echoed = PROMPT + greedy(server, "여름")
    assert texts(complete(echo=True, **GREEDY)) == [echoed]
    chunks = complete(echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed


def test_the_wire_of_a_stream_is_openais(server: Server) -> None:
    body = {"model": "여름", "prompt": PROMPT, "stream": True, "temperature": 0}
    *pieces, done = events(server.post("/v1/completions", json=body))
    assert done == "[DONE]"
    for piece in pieces:
        value = json.loads(piece)
        assert set(value) == {"id", "object", "created", "model", "choices"}
        assert set(value["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}


def test_a_text_is_scored_as_it_is_generated(complete: Any) -> None:
    """The log-probabilities of a greedy answer, read as a prompt, are those of making it."""
    asked = {"logprobs": 2, **GREEDY}
    ids = [5, 9, 30, 12]
    made = complete(prompt=ids, echo=True, **asked).choices[0]
    told = made.logprobs
    assert len(told.tokens) == 4 + 16
    assert "".join(told.tokens) == made.text
    for at, token in zip(told.text_offset, told.tokens, strict=True):
        assert made.text[at:].startswith(token)
    assert told.token_logprobs[0] is None
    plain = complete(prompt=ids, **asked).choices[0].logprobs
    assert plain.token_logprobs == pytest.approx(told.token_logprobs[4:], abs=1e-3)

    # Its own text, cut into tokens again.
    text = PROMPT + "에는"
    scored = {**asked, "max_tokens": 0, "echo": True, "prompt": text}
    only = complete(**scored)
    (choice,) = only.choices
    told = choice.logprobs
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert only.usage.completion_tokens == 0
    # Without the `<s>` in front, of which a client that counts a text's tokens does not know.
    assert len(told.tokens) == only.usage.prompt_tokens - 1
    assert "".join(told.tokens).strip() == text
    assert all(logprob < 0 for logprob in told.token_logprobs)
    assert max(told.text_offset) < len(text)
    streamed = list(complete(stream=True, **scored))
    assert "".join(c.choices[0].text for c in streamed) == text
    assert streamed[0].choices[0].logprobs == told
    assert streamed[-1].choices[0].finish_reason == "length"


def test_logprobs_tell_of_each_token(complete: Any) -> None:
    choice = checked(complete(logprobs=3, **GREEDY)).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    columns = told.tokens, told.text_offset, told.token_logprobs, told.top_logprobs
    for token, at, logprob, top in zip(*columns, strict=True):
        assert choice.text[at:].startswith(token)
        assert top[token] == max(top.values()) == logprob < 0
        assert len(top) == 3

    streamed = [c.choices[0].logprobs for c in complete(logprobs=3, stream=True, **GREEDY)]
    for field in ("text_offset", "tokens"):
        parts = [getattr(part, field) or [] for part in streamed if part]
        assert [value for part in parts for value in part] == getattr(told, field)


def test_best_of_gives_the_likeliest(complete: Any) -> None:
    def mean(choice: Any) -> float:
        return math.fsum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens)

    drawn = complete(seed=11, logprobs=0, n=5).choices
    best = complete(seed=11, logprobs=0, n=2, best_of=5)
    assert texts(best) == [c.text for c in sorted(drawn, key=mean, reverse=True)[:2]]
    assert best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in drawn)


# Chats


def test_a_chat_is_asked_by_the_models_own_template(client: openai.OpenAI) -> None:
    asked: Any = {"model": "채팅", "messages": CHAT, "temperature": 0, "max_tokens": 9}
    asked |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {}}
    extra = {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}  # as Open WebUI sends them
    made: ChatCompletion = checked(client.chat.completions.create(**asked, extra_body=extra))
    (choice,) = made.choices
    assert choice.message.role == "assistant"
    assert (made.object, made.id[:9]) == ("chat.completion", "chatcmpl-")
    raw = "<sys>짧게 답한다.<usr>안녕?<sys>"
    same = client.completions.create(model="채팅", prompt=raw, temperature=0, max_tokens=9)
    assert choice.message.content == same.choices[0].text
    assert made.usage.prompt_tokens == same.usage.prompt_tokens


def test_a_stream_of_a_chat_is_its_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "채팅", "messages": CHAT, "n": 2, "seed": 3}
    asked |= {"max_completion_tokens": 12, "logprobs": True, "top_logprobs": 2}
    made = checked(client.chat.completions.create(**asked))
    chunks: list[ChatCompletionChunk] = [
        checked(chunk) for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    for i, choice in enumerate(made.choices):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
        told = [t for c in mine if c.logprobs for t in c.logprobs.content or []]
        assert told == choice.logprobs.content
        for token in told:
            assert len(token.top_logprobs) == 2
            if not token.token.startswith("bytes:"):
                assert bytes(token.bytes or []).decode() == token.token


def test_a_template_for_one_message_takes_one(server: Server, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "한마디", "temperature": 0, "max_tokens": 16}
    one: list[Any] = [{"role": "user", "content": PROMPT}]
    made = client.chat.completions.create(**asked, messages=one)
    assert made.choices[0].message.content == greedy(server, "한마디")
    error = refused(lambda: client.chat.completions.create(**asked, messages=CHAT))
    assert (error.status_code, error.param) == (400, "messages")
    assert "chat_template.jinja" in error.message


# The Responses API

ANSWER: dict[str, Any] = {"model": "채팅", "temperature": 0, "max_output_tokens": 9}


def test_a_response_is_the_chats_text(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="채팅", messages=CHAT, temperature=0, max_tokens=9)
    parts: list[Any] = [{"type": "input_text", "text": "안녕?"}]
    for given in (
        {"input": "안녕?", "instructions": "짧게 답한다."},
        {
            "input": [
                {"role": "developer", "content": "짧게 답한다."},
                {"role": "user", "content": parts},
            ]
        },
    ):
        made: Response = checked(client.responses.create(**ANSWER, **given))
        assert made.output_text == chat.choices[0].message.content
        assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (made.id[:5], made.object, made.model) == ("resp_", "response", "채팅")
        assert (made.instructions, made.temperature) == (given.get("instructions"), 0)
        assert made.usage.input_tokens == chat.usage.prompt_tokens
        assert made.usage.output_tokens == 9
    (message,) = made.output
    again = client.responses.create(**ANSWER, input=[message.to_dict()])
    assert again.output_text  # what came back can be sent again


def test_a_stream_of_a_response_is_its_events(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ANSWER, "input": "안녕?"}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = checked(client.responses.create(**asked))
    events = [checked(event) for event in client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    begin = ["response.created", "response.in_progress"]
    begin += ["response.output_item.added", "response.content_part.added"]
    end = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    end.append("response.incomplete")
    deltas = events[4:-4]
    assert [event.type for event in events] == [
        *begin,
        *["response.output_text.delta"] * len(deltas),
        *end,
    ]
    assert "".join(event.delta for event in deltas) == made.output_text == events[-4].text
    assert {event.item_id for event in events[3:-2]} == {events[2].item.id}
    (message,), (streamed,) = made.output, events[-1].response.output
    assert streamed.content == message.content
    assert len(message.content[0].logprobs) == 9
    assert [logprob.token for event in deltas for logprob in event.logprobs] == [
        logprob.token for logprob in message.content[0].logprobs
    ]
    assert events[-1].response.usage.total_tokens == made.usage.total_tokens

    with client.responses.stream(**ANSWER, input="안녕?") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == made.output_text


def test_a_response_that_ends_by_itself_is_complete(client: openai.OpenAI) -> None:
    made = client.responses.create(**ANSWER, input="안녕?").output_text
    asked: dict[str, Any] = {**ANSWER, "input": "안녕?", "extra_body": {"stop": [made[2:4]]}}
    whole = checked(client.responses.create(**asked))
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.completed"
    for found in (whole, last.response):
        assert (found.status, found.incomplete_details) == ("completed", None)
        assert found.output_text == made[: made.index(made[2:4])]


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole input"),
        ({"conversation": "conv_1"}, "conversation", "send the whole input"),
        ({"tools": [{"type": "web_search"}]}, "tools", "/v1/chat/completions"),
        ({"background": True}, "background", "no answer is kept"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "models that reason"),
        ({"truncation": "auto"}, "truncation", "nothing is left out"),
        ({"input": []}, "input", "not empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "must be message"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"extra_body": {"messages": []}}, "messages", "known are"),
    ],
)
def test_a_response_that_cannot_be_had_is_refused(
    client: openai.OpenAI, more: dict[str, Any], param: str, said: str
) -> None:
    error = refused(lambda: client.responses.create(**{**ANSWER, "input": "안녕?", **more}))
    assert (error.status_code, error.param) == (400, param)
    assert said in error.message


def test_what_of_a_response_asks_for_nothing_is_taken(client: openai.OpenAI) -> None:
    harmless: dict[str, Any] = {
        "store": True, "tools": [], "tool_choice": "auto", "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "user": "소월",
        "reasoning": {"effort": None}, "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "나"}, "service_tier": "auto",
    }  # fmt: skip
    made = checked(client.responses.create(**ANSWER, input="안녕?", **harmless))
    assert made.output_text == client.responses.create(**ANSWER, input="안녕?").output_text
    assert (made.metadata, made.parallel_tool_calls) == ({"a": "나"}, False)
    error = refused(lambda: client.responses.retrieve("resp_1"))
    assert (error.status_code, error.code) == (404, "unknown_url")
    assert "no response is kept" in error.message


# Ids, as vLLM has them


def test_texts_and_chats_are_ids_and_text_again(server: Server, client: openai.OpenAI) -> None:
    found = server.post("/tokenize", json={"model": "여름", "prompt": PROMPT}).json()
    asked: dict[str, Any] = {"model": "여름", **GREEDY}
    made = client.completions.create(**asked, prompt=PROMPT)
    assert found["count"] == len(found["tokens"]) == made.usage.prompt_tokens
    assert (found["max_model_len"], found["token_strs"]) == (128, None)
    by_ids = client.completions.create(**asked, prompt=found["tokens"])
    assert by_ids.choices[0].text == made.choices[0].text
    body = {"model": "여름", "tokens": found["tokens"]}
    assert server.post("/detokenize", json=body).json()["prompt"].strip() == PROMPT

    body = {"model": "여름", "prompt": PROMPT, "add_special_tokens": False}
    plain = server.post("/tokenize", json={**body, "return_token_strs": True}).json()
    assert plain["tokens"] == found["tokens"][1:]
    assert "".join(plain["token_strs"]).strip() == PROMPT

    messages = [{"role": "user", "content": "안녕?"}]
    chat = client.chat.completions.create(model="채팅", messages=messages, **GREEDY)  # type: ignore
    counted = server.post("/tokenize", json={"model": "채팅", "messages": messages}).json()
    assert counted["count"] == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/tokenize", {"model": "여름"}, 400, "prompt or messages must be given"),
        ("/tokenize", {"model": "여름", "prompt": "가", "온도": 1}, 400, "known are add_generat"),
        ("/tokenize", {"model": "여름", "messages": [], "add_generation_prompt": False}, 400, ""),
        ("/tokenize", {"prompt": "가"}, 400, "model must be text"),
        ("/tokenize", {"model": "없음", "prompt": "가"}, 404, "없음"),
        ("/detokenize", {"model": "여름", "tokens": "가"}, 400, "tokens must be a list"),
        ("/detokenize", {"model": "여름", "tokens": [160]}, 400, "vocabulary ends at 159"),
    ],
)
def test_ids_that_cannot_be_had_are_refused(
    server: Server, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    answer = server.post(path, json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


# What is refused


def test_a_prompt_that_does_not_fit_has_openais_code(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.completions.create(model="여름", prompt="산에는 꽃 피네 " * 100),
        lambda: client.completions.create(model="여름", prompt=PROMPT * 5000, stream=True),
    ):
        error = refused(call)
        assert (error.status_code, error.code) == (400, "context_length_exceeded")
        assert error.param == "prompt"
        assert "This model's maximum context length is exceeded: prompt has" in error.message
