"""Speculation: a client gets the same texts with and without it, and `usage` counts the guesses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.stores import serving
from tests.e2e.test_metrics import metrics
from tests.engine.engines import make_talkative

pytestmark = pytest.mark.slow

MODEL = "수다"


@pytest.fixture(scope="module")
def servers(clean: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A server without speculation and one with it."""
    folder = tmp_path_factory.mktemp("speculation")
    for store in (clean.store, folder / "store"):
        make_talkative(store / MODEL, max_length=256)  # its texts repeat themselves
    with serving(folder / "run", folder / "store", ENGINE_SPECULATION="auto") as guessing:
        yield [clean, guessing]


def answer(server: Server, prompt: str, given: dict[str, Any]) -> tuple[str, int, int, int]:
    """A text, and how many of its tokens were made, guessed right, and guessed wrong."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 60, **given}
    found = server.post("/v1/completions", json=body).json()
    usage = found["usage"]
    details = usage["completion_tokens_details"]
    guesses = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    return found["choices"][0]["text"], usage["completion_tokens"], *guesses


@pytest.mark.parametrize("given", [{"temperature": 0}, {"temperature": 0.2, "seed": 7}], ids=str)
def test_an_answer_is_the_same_and_usage_counts_its_guesses(
    servers: list[Server], given: dict[str, Any]
) -> None:
    """Of streams: serving/api/openai/test_routes.py."""
    without, guessing = servers

    def counted() -> list[float]:
        names, found = ("accepted_tokens", "guessed_tokens"), metrics(guessing)
        return [found.get((f"kogpt2_model_{name}_total", MODEL), 0) for name in names]

    before, accepted, rejected = counted(), 0, 0
    for prompt in ("나는 오늘", "산에는 꽃 피네", "가실 때에는"):
        text, tokens, *none = answer(without, prompt, given)
        assert text.strip()
        assert none == [0, 0]
        same, made, right, wrong = answer(guessing, prompt, given)
        assert (same, made) == (text, tokens)
        assert right < made  # the first token is drawn
        accepted, rejected = accepted + right, rejected + wrong
    assert accepted > 0
    after = counted()
    assert [a - b for a, b in zip(after, before, strict=True)] == [accepted, accepted + rejected]
