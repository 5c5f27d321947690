"""Speculation: what is guessed, when it stops, and that texts are the same with and without."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine import generation
from engine.backends.interface import Logits, Piece
from engine.engine import Engine
from engine.guesses import FEWEST, MOST, PAUSE, RECENT_TOKENS, Guesser, Recent, Text
from engine.native.model import NativeModel
from engine.settings import Settings
from engine.text import constraint
from engine.text.prompts import Raw
from tests.engine.adapters import make_adapter
from tests.engine.engines import Pause, Request, make_talkative, settle
from tests.engine.hugging_face import make_hugging_face
from tests.processes import eventually

ANSWER = 60


def test_a_guess_is_what_followed_the_same_tokens_the_longer_run_first() -> None:
    text, recent = Text(), Recent()
    text.extend([1, 2, 3, 4, 9, 2, 3, 5])
    assert text.after((1, 2, 3), 2) == [4, 9]
    assert text.after((2, 3), 5) == [5]
    assert text.after((3, 5), 5) == []  # the end
    assert Guesser(recent).guess([1, 2, 3, 4, 9, 8, 2, 3, 5, 1, 2, 3], 10) == [4, 9, 8]
    recent.extend([10, 11, 12, 13, 14, 15])  # an earlier answer
    assert Guesser(recent).guess([1, 10, 11], 2) == [12, 13]


def test_few_answers_are_remembered() -> None:
    recent = Recent()
    for begin in range(0, 3 * RECENT_TOKENS, 100):
        recent.extend(range(begin, begin + 100))
        assert len(recent.ids) <= RECENT_TOKENS
        assert len(recent._behind) <= 2 * RECENT_TOKENS
    assert recent.ids[-1] == begin + 99


def test_guesses_stop_where_they_are_wrong_and_are_tried_again() -> None:
    guesser, ids, tried = Guesser(Recent()), [1, 2, 3, 1, 2, 3, 1, 2, 3], []
    for _ in range(10 * PAUSE):
        guessed = guesser.guess(ids, 100)
        if guessed:
            guesser.check(len(guessed), 0)
        tried.append(bool(guessed))
    assert tried[:5] == [True] * 4 + [False]
    again = [at for at, guessed in enumerate(tried) if guessed and at >= 5]
    assert [later - at for at, later in pairwise(again)] == [2 * PAUSE + 2, 4 * PAUSE + 2]
    assert again[0] == 5 + PAUSE


def test_more_are_guessed_where_all_are_right() -> None:
    guesser, ids, counts = Guesser(Recent()), [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3, []
    for right in (1.0, 1.0, 0.0, 1.0):
        guessed = guesser.guess(ids, 100)
        counts.append(len(guessed))
        guesser.check(len(guessed), int(right * len(guessed)))
    assert counts == [FEWEST, MOST, MOST, FEWEST]


# In the engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Engines without and with speculation; greedy texts of small random models repeat."""
    root = tmp_path_factory.mktemp("guesses")
    folder = make_talkative(root / "m", max_length=256)
    folders: dict[str, Path] = {name: make_adapter(root / name, folder, seed=i)
                                for i, name in enumerate(("a0", "a1"))}  # fmt: skip
    made = []
    for speculation in ("off", "auto"):
        engine = Engine(Settings(memory_mib=64, backend="native", speculation=speculation))
        made.append(engine)
        engine.load("m", str(folder))
        for name, adapter in folders.items():
            engine.load(name, str(adapter), base=str(folder))
        form = make_hugging_face(root / "f", kind="byte-level", max_length=256)
        engine.load("f", str(form))
    yield made
    for engine in made:
        engine.close()


def prompts(count: int) -> list[Raw]:
    rng = random.Random(7)  # noqa: S311
    return [Raw([2, *(rng.randrange(4, 150) for _ in range(12))]) for _ in range(count)]


def output(engine: Engine, *requests: Request) -> list[list[tuple[Any, ...]]]:
    """All that the clients get. The library computes for one engine at a time, so this one has
    nothing left to do when it returns."""
    assert [request.wait().error for request in requests] == [None] * len(requests)
    eventually(lambda: not any(model.batch.has_work for model in engine._models.values()))
    settle(engine)
    return [
        [(t.index, t.id, t.text, t.logprobs, t.finish_reason) for t in tokens]
        for tokens in (sorted(request.tokens, key=lambda t: t.index) for request in requests)
    ]


def same(engines: list[Engine], name: str, prompt: Any, **given: Any) -> Request:
    """A request with speculation, whose output is the same without."""
    given = {"max_new_tokens": ANSWER, **given}
    without = output(engines[0], Request(engines[0], name, prompt, **given))
    guessing = Request(engines[1], name, prompt, **given)
    assert output(engines[1], guessing) == without
    return guessing


def counted(engine: Engine) -> list[int]:
    names = ("accepted_tokens", "guessed_tokens")
    return [sum(model[name] for model in engine.models()) for name in names]


SCHEMA = {"type": "array", "items": {"enum": ["긍정", "부정"]}, "minItems": 6, "maxItems": 8}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("m", {}),
        ("m", {"do_sample": True, "seed": 3, "temperature": 0.2}),
        ("m", {"do_sample": True, "seed": 3, "top_k": 5, "top_p": 0.9}),
        ("m", {"repetition_penalty": 1.02, "frequency_penalty": 0.01}),
        ("m", {"logprobs": 2}),
        ("m", {"num_return_sequences": 2, "do_sample": True, "seed": 1, "temperature": 0.1}),
        ("a0", {}),
        ("a1", {}),
        ("f", {"json_schema": SCHEMA, "max_new_tokens": 200}),
        ("f", {"json_schema": SCHEMA, "max_new_tokens": 200, "do_sample": True, "seed": 2}),
        ("f", {"json_schema": {**SCHEMA, "minItems": 9, "maxItems": 20}}),
    ],
    ids=str,
)
def test_texts_are_the_same_and_tokens_say_which_were_guessed(
    engines: list[Engine], name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (generation, constraint):  # a guess whose mask is late counts as wrong
        monkeypatch.setattr(module, "WAIT_S", 60.0)
    before = counted(engines[1])
    tokens = [
        token
        for prompt in (prompts(4) if name != "f" else ("오늘은", "내일은", "어제는"))
        for token in same(engines, name, prompt, **given).tokens
    ]
    right, wrong = sum(t.accepted for t in tokens), sum(t.rejected for t in tokens)
    assert counted(engines[1]) == [before[0] + right, before[1] + right + wrong]
    assert min(right, wrong) > 0 or "num_return_sequences" in given  # two rows: none
    assert not any(t.accepted and t.rejected for t in tokens if t.finish_reason is None)
    assert counted(engines[0]) == [0, 0]


def test_texts_of_rows_that_come_and_go_are_the_same(engines: list[Engine]) -> None:
    found = []
    for engine in engines:
        with Pause(engine):
            requests = [
                Request(engine, "m", prompt, max_new_tokens=20 + 15 * i)
                for i, prompt in enumerate(prompts(5))
            ]
        found.append(output(engine, *requests))
    assert found[0] == found[1]


def test_an_answer_ends_at_its_stop_text_as_without(engines: list[Engine]) -> None:
    sampled, stopped = {"do_sample": True, "seed": 4}, 0
    for prompt in prompts(4):
        texts = [token.text for token in same(engines, "m", prompt, **sampled).tokens]
        stop = next((text for text in texts[ANSWER // 2 :] if text.strip()), None)
        if stop is not None:
            ended = same(engines, "m", prompt, stop=[stop], **sampled)
            assert ended.finish_reason() == "stop"
            stopped += 1
    assert stopped


def test_no_row_is_longer_than_what_was_reserved_for_it(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, run = [], NativeModel.run

    def watched(model: NativeModel, pieces: Sequence[Piece]) -> Logits:
        lengths.extend(piece.row.length + len(piece.ids) for piece in pieces)
        return run(model, pieces)

    monkeypatch.setattr(NativeModel, "run", watched)
    for prompt in prompts(3):
        request = Request(engines[1], "m", prompt, max_new_tokens=ANSWER)
        output(engines[1], request)
        assert max(lengths) < len(request.prompt) + ANSWER
        lengths.clear()
