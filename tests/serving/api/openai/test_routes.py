"""OpenAI's client against the gateway's routes, over an engine that a test has in its hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import orjson
import pytest

from common.errors import EngineError, EngineUnavailable, ModelNotFound, Overloaded
from serving.api import answering
from serving.api.openai.answers import Answer
from serving.api.openai.errors import Refused
from serving.api.openai.parsing import completion
from serving.errors import TooManyRequests
from tests.lazy import openai
from tests.serving.api.gateways import SAID as TEXT
from tests.serving.api.gateways import FakeEngine, World, model

pytestmark = pytest.mark.virtual_time

ASKED: dict[str, Any] = {"model": "봄", "prompt": "나 보기가", "temperature": 0}
FIRST = {"index": 0, "token": 5, "text": TEXT, "prompt_tokens": 3, "cached_tokens": 2}
BREAKS_OFF = [FIRST, EngineError("a step failed")]


@contextlib.asynccontextmanager
async def served(
    engine: FakeEngine, **options: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, World]]:
    world = World(engine=engine)
    transport = httpx2.ASGITransport(world.app)
    async with openai.AsyncOpenAI(
        base_url=f"http://gateway:{world.gateway.settings.port}/v1",
        api_key="없어도 된다".encode().hex(),
        http_client=httpx2.AsyncClient(transport=transport),
        **options,
    ) as client:
        yield client, world
    assert (world.gateway.requests, world.model.in_flight) == (0, 0)
    assert world.model.line.running == 0


def body(error: openai.APIStatusError) -> dict[str, Any]:
    found: dict[str, Any] = error.response.json()["error"]
    return found


async def test_a_client_comes_again_when_it_was_told_to_and_an_engine_is_asked_again() -> None:
    full = TooManyRequests("256 requests to this model are waiting already", retry_after_s=3)
    again = [Overloaded("256 requests wait already", retry_after_s=3)]
    engine = FakeEngine(full, full, *again, EngineUnavailable("the engine does not answer"))
    async with served(engine) as (client, _):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.with_options(max_retries=0).completions.create(**ASKED)
        assert body(caught.value)["code"] == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "3"
        began = asyncio.get_running_loop().time()
        made = await client.completions.create(**ASKED)
        assert made.choices[0].text == TEXT
        assert asyncio.get_running_loop().time() - began >= 6
    assert len(engine.asked) == 5


async def test_the_engine_is_asked_for_what_the_client_wants() -> None:
    engine = FakeEngine()
    async with served(engine) as (client, _):
        await client.completions.create(**ASKED, max_tokens=5)
        messages: list[Any] = [{"role": "user", "content": "안녕?"}]
        await client.chat.completions.create(model="봄.tar.gz", messages=messages, temperature=0.5)
    greedy = {"do_sample": False, "num_return_sequences": 1, "max_new_tokens": 5}
    drawn = {"do_sample": True, "temperature": 0.5, "top_p": 1.0}
    drawn |= {"num_return_sequences": 1, "max_new_tokens": 1_000_000}
    chat = [{"role": "user", "content": "안녕?"}]
    name = model().engine_name
    assert engine.asked == [
        (name, "나 보기가", greedy, 60, "prompt"),
        (name, chat, drawn, 60, "messages"),
    ]


async def test_an_error_of_ours_is_a_500_that_says_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(FakeEngine(ZeroDivisionError("비밀")), max_retries=0) as (client, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**ASKED)
        assert body(caught.value) == {
            "message": "an error inside the server; the log has it under the request id",
            "type": "server_error",
            "param": None,
            "code": None,
        }
        (logged,) = (r for r in caplog.records if r.exc_info)
        assert "비밀" in caplog.text
        assert vars(logged)["fields"] == {"request_id": caught.value.request_id}


async def test_a_model_with_a_script_is_not_asked_behind_its_back() -> None:
    async with served(FakeEngine()) as (client, world):
        world.model.in_engine = False
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**ASKED)
        assert body(caught.value)["param"] == "model"
        assert "/predictions/봄" in caught.value.message


async def test_a_stream_that_breaks_off_is_an_error_of_the_clients() -> None:
    async with served(FakeEngine(streamed=BREAKS_OFF), max_retries=0) as (client, world):
        chunks = await client.completions.create(**ASKED, stream=True)
        assert (await anext(aiter(chunks))).choices[0].text == TEXT
        with pytest.raises(openai.APIError, match="a step failed"):
            await anext(aiter(chunks))
        made = await client.responses.create(model="봄", input="안녕?", stream=True)
        *_, last = [event async for event in made]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error is not None
        assert last.response.error.message == "a step failed"
        world.engine.fails.append(EngineError("a step failed"))  # before the first token
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(**ASKED, stream=True)


async def test_a_stream_ends_with_an_error_if_the_model_is_lost_before_a_later_prompt() -> None:
    def streamed(name: str, prompt: str, *_: Any) -> list[Any]:
        return [FIRST] if prompt == "나 보기가" else [ModelNotFound("model 봄 is not loaded")]

    prompts: Any = {"prompt": ["나 보기가", "산에는"]}
    async with served(FakeEngine(streamed=streamed), max_retries=0) as (client, _):
        chunks = await client.completions.create(**ASKED | prompts, stream=True)
        assert (await anext(aiter(chunks))).choices[0].text == TEXT
        with pytest.raises(openai.APIError, match="Model 봄 is being loaded again"):
            await anext(aiter(chunks))


def guesses(usage: openai.types.CompletionUsage) -> tuple[int | None, int | None]:
    """Accepted and rejected ones."""
    details = usage.completion_tokens_details
    assert details is not None
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


async def test_half_a_character_waits_in_a_stream() -> None:
    items = [
        {"index": 0, "token": 5, "text": "", "prompt_tokens": 3, "cached_tokens": 2},
        {"index": 0, "token": 6, "text": "가", "accepted_tokens": 1, "rejected_tokens": 0},
        {"index": 0, "token": 7, "text": "", "rejected_tokens": 2, "finish_reason": "stop"},
    ]
    async with served(FakeEngine(streamed=items)) as (client, _):
        options: dict[str, Any] = {"include_usage": True}
        chunks = await client.completions.create(**ASKED, stream=True, stream_options=options)
        *made, last = [chunk async for chunk in chunks]
        assert [(c.choices[0].text, c.choices[0].finish_reason) for c in made] == [
            ("가", None),
            ("", "stop"),
        ]
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 3)
        assert last.usage.prompt_tokens_details.cached_tokens == 2
        assert guesses(last.usage) == (1, 2)
        options["continuous_usage_stats"] = True
        chunks = await client.completions.create(**ASKED, stream=True, stream_options=options)
        used = [(c.usage.total_tokens, *guesses(c.usage)) async for c in chunks if c.usage]
        assert used == [(5, 1, 0), (6, 1, 2), (6, 1, 2)]


@pytest.mark.parametrize(
    ("method", "path", "sent", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("GET", "/v1/completions", b"", 405),
        ("POST", "/v1/embeddings", b"{}", 404),
        ("GET", "/v1/files", b"", 404),
        ("DELETE", "/v1/models/봄", b"", 405),
        ("GET", "/v1/models/없음", b"", 404),
    ],
)
async def test_whatever_is_wrong_is_said_in_openais_shape(
    method: str, path: str, sent: bytes, status: int
) -> None:
    found, headers, answered = await World(sagemaker_multi_model=True).call(method, path, sent)
    assert (found, headers["content-type"]) == (status, "application/json")
    said = json.loads(answered)["error"]
    assert set(said) == {"message", "type", "param", "code"}
    assert said["type"] == "invalid_request_error"
    assert headers["x-request-id"]
    assert status != 405 or path in said["message"]


@pytest.mark.parametrize(
    ("more", "rows"), [({}, 1), ({"prompt": ["가", "나"]}, 2), ({"stream": True}, 1)]
)
async def test_a_client_that_goes_away_is_not_worked_on(more: dict[str, Any], rows: int) -> None:
    engine, gone = FakeEngine(streamed=[FIRST, FIRST]), asyncio.Event()
    engine.go.clear()
    world = World(model(capacity=2), engine)
    sent = {**ASKED, **more}
    call = asyncio.create_task(world.call("POST", "/v1/completions", sent, gone=gone))
    while engine.running < rows:
        await asyncio.sleep(0)
    gone.set()
    await asyncio.gather(call, return_exceptions=True)
    assert asyncio.get_running_loop().time() == 0  # not at its deadline
    assert (engine.running, len(engine.asked)) == (0, rows)
    assert (world.gateway.requests, world.model.in_flight, world.model.line.running) == (0, 0, 0)


def scored(index: int, text: str, **more: Any) -> dict[str, Any]:
    top = [{"token": 7, "text": "가", "logprob": -0.1}, {"token": 8, "text": "나", "logprob": -3.0}]
    step = {"token": 7, "text": text, "logprob": -0.1, "top": top}
    return {"index": index, "token": 7, "text": text, "logprobs": step, **more}


async def test_scores_are_written_as_they_come_and_not_kept_as_values() -> None:
    counts = {"prompt_tokens": 3, "cached_tokens": 1}
    engine = FakeEngine(
        streamed=[
            scored(0, "가실 ", **counts),
            scored(1, "나", **counts),
            scored(0, "때", finish_reason="stop", accepted_tokens=1, rejected_tokens=2),
            scored(1, "빛", finish_reason="length", accepted_tokens=1, rejected_tokens=1),
        ]
    )
    async with served(engine) as (client, _):
        made = await client.completions.create(**ASKED | {"n": 2, "temperature": 1, "logprobs": 2})
        assert [choice.text for choice in made.choices] == ["가실 때", "나빛"]
        assert [choice.finish_reason for choice in made.choices] == ["stop", "length"]
        for choice in made.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.top_logprobs == [
                {"가": -0.1, "나": -3.0, text: -0.1} for text in choice.logprobs.tokens or []
            ]
        assert made.usage is not None
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 4)
        assert guesses(made.usage) == (2, 3)
    answer = Answer(completion({**ASKED, "logprobs": 2}), "봄")
    assert isinstance(answer.compact(scored(0, "가")["logprobs"])["top"], orjson.Fragment)
    assert len(engine.asked) == 1


def offset_item(text: str, special: bool = False) -> dict[str, Any]:
    item = {"token": len(text), "text": text, "logprob": -0.1, "top": []}
    return {**item, "special": True} if special else item


@pytest.mark.parametrize(
    ("prompt", "prefill", "wanted"),
    [
        ("<usr>봄", [("<s>", True), ("<usr>", True), (" 봄", False)], [0, 4, 6, 7, 7, 8]),
        ([0, 2, 9], [("<s>", True), ("<usr>", True), (" 봄", False)], [0, 3, 8, 10, 11, 11, 12]),
        ("봄", [("봄", False)], [0, 1, 2, 2, 3]),
    ],
)
def test_control_tokens_count_in_offsets_where_the_text_has_them(
    prompt: Any, prefill: list[tuple[str, bool]], wanted: list[int]
) -> None:
    """In an echoed prompt, not in the answer, whole or as a stream."""
    parsed = completion({**ASKED, "prompt": prompt, "echo": True, "logprobs": 0})
    made = [offset_item("이"), offset_item("<sys>", special=True), offset_item("가")]
    made.append(offset_item("</s>", special=True))
    before = [offset_item(*each) for each in prefill]
    answer = {"text": "이가", "tokens": 4, "finish_reason": "stop", "logprobs": made}
    result = {"completions": [{**answer, "prefill": before}]}
    body = Answer(parsed, "봄").whole([{**result, "prompt_tokens": 3, "cached_tokens": 0}])
    [choice] = orjson.loads(body)["choices"]
    assert choice["logprobs"]["text_offset"] == wanted
    ends = choice["text"].removesuffix("이가")
    assert choice["logprobs"]["text_offset"][-4:] == [len(ends) + at for at in (0, 1, 1, 2)]
    choices = Answer(parsed, "봄").choices(parsed.prompts[0], 0)
    offsets: list[int] = []
    for i, step in enumerate(made):
        item = {"index": 0, "text": "", "token": 1, "logprobs": step}
        head = {"prefill": before, "prompt_tokens": 3, "cached_tokens": 0} if i == 0 else {}
        for event in choices.write({**item, **head}).decode().split("data: ")[1:]:
            [chunk] = json.loads(event)["choices"]
            offsets += chunk["logprobs"]["text_offset"]
    assert offsets == wanted


def test_an_answer_has_a_bound_beyond_what_is_asked_for_in_earnest() -> None:
    drawn: dict[str, Any] = {**ASKED, "temperature": 1}
    for asked in (
        {"prompt": ["가"] * 64, "n": 16, "logprobs": 20, "max_tokens": 20},
        {"prompt": ["가"] * 16, "n": 2, "logprobs": 20, "max_tokens": 1000},
        {"prompt": ["가"] * 64, "echo": True, "logprobs": 20, "max_tokens": 0},
    ):
        with pytest.raises(Refused, match="an answer has at most 400000"):
            completion(drawn | asked)
    for asked in (
        {"prompt": ["가"] * 16, "n": 16, "logprobs": 20, "max_tokens": 16},
        {"n": 16, "logprobs": 20, "max_tokens": 1024},
        {"prompt": ["가"] * 64, "echo": True, "logprobs": 5, "max_tokens": 0},
        {"prompt": ["가"] * 64, "n": 16, "max_tokens": 1024},
    ):
        completion(drawn | asked)


async def test_an_answer_has_a_bound_however_long_the_context_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "MAX_SCORES", 8)
    counts = {"prompt_tokens": 3, "cached_tokens": 1}
    engine = FakeEngine(streamed=[scored(0, "가", **counts), *[scored(0, "나")] * 2])
    async with served(engine) as (client, _):
        with pytest.raises(openai.BadRequestError, match="more than 8 log-probabilities"):
            await client.completions.create(**ASKED | {"logprobs": 2})
