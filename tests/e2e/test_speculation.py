"""Speculation: a client gets the same texts with and without it, and `usage` counts the guesses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from tests.e2e.server import Server
from tests.e2e.stores import serving
from tests.e2e.test_metrics import metrics
from tests.e2e.test_openai import checked
from tests.engine.engines import make_talkative

pytestmark = pytest.mark.slow

MODEL, TOKENS = "수다", 60
TEMPLATE = "<usr>{{ messages[-1].content }}<sys>"
PROMPTS = ("나는 오늘", "산에는 꽃 피네", "가실 때에는")


def store(folder: Path) -> Path:
    model = make_talkative(folder / MODEL, max_length=256)  # its texts repeat themselves
    (model / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return folder


@pytest.fixture(scope="module")
def servers(clean: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A server without speculation and one with it."""
    store(clean.store)
    folder = tmp_path_factory.mktemp("speculation")
    with serving(folder / "run", store(folder / "store"), ENGINE_SPECULATION="auto") as guessing:
        yield [clean, guessing]


def answer(server: Server, prompt: str, chat: bool, stream: bool, given: Any) -> Any:
    """A text and its usage."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, **given}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    with openai.OpenAI(base_url=server.url("/v1"), api_key="x", max_retries=0) as client:
        if chat:
            messages = [{"role": "user", "content": prompt}]
            made: Any = client.chat.completions.create(messages=messages, **asked)  # type: ignore
        else:
            made = client.completions.create(prompt=prompt, **asked)
        *chunks, last = made if stream else [made]
    choices = [chunk.choices[0] for chunk in chunks or [last]]
    checked(last)
    if not chat:
        return "".join(choice.text for choice in choices), last.usage
    parts = [choice.delta if stream else choice.message for choice in choices]
    return "".join(part.content or "" for part in parts), last.usage


def guesses(usage: CompletionUsage) -> list[int]:
    """Accepted and all."""
    details: Any = usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted < usage.completion_tokens  # the first token is drawn
    return [accepted, accepted + rejected]


def counted(server: Server) -> list[float]:
    """The same by the server's metrics."""
    names = ("accepted_tokens", "guessed_tokens")
    found = metrics(server)
    return [found.get((f"kogpt2_model_{name}_total", MODEL), 0) for name in names]


@pytest.mark.parametrize(
    ("chat", "stream", "given"),
    [
        (False, False, {"temperature": 0}),
        (False, True, {"temperature": 0.2, "seed": 7}),
        (True, False, {"temperature": 0.2, "seed": 7}),
        (True, True, {"temperature": 0}),
    ],
)
def test_an_answer_is_the_same_and_usage_counts_its_guesses(
    servers: list[Server], chat: bool, stream: bool, given: dict[str, Any]
) -> None:
    without, guessing = servers
    before, total = counted(guessing), [0, 0]
    for prompt in PROMPTS:
        text, usage = answer(without, prompt, chat, stream, given)
        assert text.strip()
        assert guesses(usage) == [0, 0]
        same, used = answer(guessing, prompt, chat, stream, given)
        assert same == text
        assert used.completion_tokens == usage.completion_tokens
        total = [a + b for a, b in zip(total, guesses(used), strict=True)]
    assert total[0] > 0
    after = counted(guessing)
    assert [a - b for a, b in zip(after, before, strict=True)] == total
