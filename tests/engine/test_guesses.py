"""Speculation: what is guessed, when it stops, and that texts are the same with and without."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.backends.interface import Logits, Piece
from engine.engine import Engine
from engine.guesses import FEWEST, MOST, PAUSE, RECENT_TOKENS, Guesser, Recent, Text
from engine.native.model import NativeModel
from engine.settings import Settings
from engine.text.prompts import Raw
from tests.engine.adapters import make_adapter
from tests.engine.engines import Pause, Request, make_talkative, settle, until
from tests.engine.hugging_face import make_hugging_face

SEED = 7
ANSWER = 60


def test_what_followed_the_same_tokens_is_guessed_the_longer_run_first() -> None:
    text = Text()
    text.extend([1, 2, 3, 4, 9, 2, 3, 5])
    assert text.after((1, 2, 3), 2) == [4, 9]
    assert text.after((2, 3), 5) == [5]
    assert text.after((3, 5), 5) == []  # the end
    assert Guesser(Recent()).guess([1, 2, 3, 4, 9, 8, 2, 3, 5, 1, 2, 3], 10) == [4, 9, 8]


def test_a_guess_may_come_from_an_earlier_answer() -> None:
    recent = Recent()
    recent.extend([10, 11, 12, 13, 14, 15])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its greedy texts repeat themselves, as small random models' do."""
    return make_talkative(tmp_path_factory.mktemp("guesses") / "model", max_length=256)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    made = [
        Engine(Settings(memory_mib=64, backend="native", speculation=speculation))
        for speculation in ("off", "auto")
    ]
    yield made
    for engine in made:
        engine.close()


def load(engines: list[Engine], name: str, folder: Path, base: Path | None = None) -> None:
    for engine in engines:
        if name not in engine._models:
            engine.load(name, str(folder), base=None if base is None else str(base))


def prompts(count: int) -> list[Raw]:
    rng = random.Random(SEED)  # noqa: S311
    return [Raw([2, *(rng.randrange(4, 150) for _ in range(12))]) for _ in range(count)]


def told(engine: Engine, *requests: Request) -> list[tuple[Any, ...]]:
    """All that the clients get. The library computes for one engine at a time, so this one has
    nothing left to do when it returns."""
    found = [_told(request) for request in requests]
    until(lambda: not any(model.batch.has_work for model in engine._models.values()))
    settle(engine)
    return found


def _told(request: Request) -> list[tuple[Any, ...]]:
    assert request.wait().error is None
    tokens = sorted(request.tokens, key=lambda token: token.index)
    return [(t.index, t.id, t.text, t.logprobs, t.finish_reason) for t in tokens]


def counted(engine: Engine, name: str) -> int:
    return sum(model[name] for model in engine.models())


def accepted(engine: Engine) -> int:
    return counted(engine, "accepted_tokens")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"do_sample": True, "seed": 3, "temperature": 0.2},
        {"do_sample": True, "seed": 3, "top_k": 5, "top_p": 0.9},
        {"repetition_penalty": 1.02, "frequency_penalty": 0.01},
        {"logprobs": 2},
        {"num_return_sequences": 2, "do_sample": True, "seed": 1, "temperature": 0.1},
    ],
    ids=str,
)
def test_texts_are_the_same_with_and_without(
    engines: list[Engine], folder: Path, given: dict[str, Any]
) -> None:
    load(engines, "m", folder)
    before = accepted(engines[1])
    for prompt in prompts(4):
        without, guessing = (
            told(engine, Request(engine, "m", prompt, max_new_tokens=ANSWER, **given))
            for engine in engines
        )
        assert guessing == without
    assert accepted(engines[1]) > before or "num_return_sequences" in given  # two rows: none
    assert accepted(engines[0]) == 0


def test_texts_of_rows_that_come_and_go_are_the_same(engines: list[Engine], folder: Path) -> None:
    load(engines, "m", folder)
    found = []
    for engine in engines:
        with Pause(engine):
            requests = [
                Request(engine, "m", prompt, max_new_tokens=20 + 15 * i)
                for i, prompt in enumerate(prompts(5))
            ]
        found.append(told(engine, *requests))
    assert found[0] == found[1]


def test_an_answer_ends_at_its_stop_text_as_without(engines: list[Engine], folder: Path) -> None:
    load(engines, "m", folder)
    sampled, stopped = {"max_new_tokens": ANSWER, "do_sample": True, "seed": 4}, 0
    for prompt in prompts(4):
        ((*tokens,),) = told(engines[0], Request(engines[0], "m", prompt, **sampled))
        stop = next((text for _, _, text, *_ in tokens[ANSWER // 2 :] if text.strip()), None)
        if stop is not None:
            found = [told(e, Request(e, "m", prompt, stop=[stop], **sampled)) for e in engines]
            assert found[0] == found[1]
            assert found[0][0][-1][-1] == "stop"
            stopped += 1
    assert stopped


def test_texts_of_adapters_are_the_same(
    engines: list[Engine], folder: Path, tmp_path: Path
) -> None:
    for at in range(2):
        adapter = make_adapter(tmp_path / f"a{at}", folder, seed=at)
        load(engines, f"a{at}", adapter, folder)
    before = accepted(engines[1])
    for i, prompt in enumerate(prompts(4)):
        found = [told(e, Request(e, f"a{i % 2}", prompt, max_new_tokens=ANSWER)) for e in engines]
        assert found[0] == found[1]
    assert accepted(engines[1]) > before


def test_texts_of_a_form_are_the_same(engines: list[Engine], tmp_path: Path) -> None:
    load(engines, "f", make_hugging_face(tmp_path / "f", kind="byte-level", max_length=256))
    schema = {"type": "array", "items": {"enum": ["긍정", "부정"]}, "minItems": 6, "maxItems": 8}
    before = accepted(engines[1])
    for given in ({}, {"do_sample": True, "seed": 2}):
        for text in ("오늘은", "내일은", "어제는"):
            without, guessing = (
                told(e, Request(e, "f", text, max_new_tokens=200, json_schema=schema, **given))
                for e in engines
            )
            assert guessing == without
    assert accepted(engines[1]) > before


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"do_sample": True, "seed": 3, "temperature": 0.2},
        {"json_schema": {"type": "array", "items": {"enum": ["긍정", "부정"]}, "minItems": 9}},
    ],
    ids=str,
)
def test_tokens_say_which_of_them_were_guessed_and_what_was_guessed_in_vain(
    engines: list[Engine], folder: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    load(engines[1:], "m", folder)
    load(engines[1:], "f", make_hugging_face(tmp_path / "f", kind="byte-level", max_length=256))
    names = ("accepted_tokens", "guessed_tokens")
    before = [counted(engines[1], name) for name in names]
    right = wrong = 0
    for prompt in ("오늘은", "내일은", "어제는"):
        name = "f" if "json_schema" in given else "m"
        request = Request(engines[1], name, prompt, max_new_tokens=ANSWER, **given)
        told(engines[1], request)
        right += sum(token.accepted for token in request.tokens)
        wrong += sum(token.rejected for token in request.tokens)
        assert not any(token.accepted and token.rejected for token in request.tokens[:-1])
    after = [counted(engines[1], name) for name in names]
    assert [after[0] - before[0], after[1] - before[1]] == [right, right + wrong]
    assert right
    assert wrong


def test_no_row_is_longer_than_what_was_reserved_for_it(
    engines: list[Engine], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(engines, "m", folder)
    lengths, run = [], NativeModel.run

    def watched(model: NativeModel, pieces: Sequence[Piece]) -> Logits:
        lengths.extend(piece.row.length + len(piece.ids) for piece in pieces)
        return run(model, pieces)

    monkeypatch.setattr(NativeModel, "run", watched)
    for prompt in prompts(3):
        request = Request(engines[1], "m", prompt, max_new_tokens=ANSWER)
        told(engines[1], request)
        assert max(lengths) < len(request.prompt) + ANSWER
        lengths.clear()
