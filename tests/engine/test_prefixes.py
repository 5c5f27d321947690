"""What is kept of prompts that were answered, for how long, and that no text shows it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.prefixes import Prefix, Prefixes, shared_length, to_ids
from engine.settings import Settings
from engine.text.prompts import Raw
from tests.engine.engines import Pause, Request, make_talkative, settle
from tests.engine.sentences import SENTENCES

CONTEXT = 512
SEED = 20
BACKENDS = (("mxnet", "int8"), ("native", "int8"), ("native", "fp32"))


def test_what_two_prompts_share_is_counted_in_tokens() -> None:
    ids = to_ids(range(100))
    other = ids.copy()
    other[40] = 7
    assert shared_length(ids, ids) == 100
    assert shared_length(ids, other) == 40
    assert shared_length(ids, ids[:15]) == 15
    assert shared_length(ids[:0], ids) == 0


@dataclass
class Row:
    length: int
    num_bytes: int = 10


class Rows:
    """Stands in for a model: notes which rows are closed and opened."""

    def __init__(self) -> None:
        self.closed: list[Row] = []

    def open_row(self, source: Row, length: int) -> Row:
        return Row(length)

    def close_row(self, row: Row) -> None:
        self.closed.append(row)


class Store:
    """Rows of one owner, ten bytes each."""

    def __init__(self, limit: int = 100) -> None:
        self.available, self.short = limit, 0
        self.prefixes = Prefixes(limit, lambda: self.available, lambda: self.short)
        self.owner, self.rows = object(), Rows()

    def keep(self, *ids: int, owner: object = None) -> bool:
        row: Any = Row(len(ids))
        model: Any = self.rows
        return self.prefixes.add(Prefix(owner or self.owner, to_ids(ids), row, model))

    @property
    def kept(self) -> list[list[int]]:
        """The least recently used is first."""
        return [prefix.ids.tolist() for prefix in self.prefixes._prefixes]


def test_the_least_recently_used_row_is_evicted_and_closed() -> None:
    store = Store(limit=30)
    for i in range(3):
        store.keep(i, i)
    assert not store.keep(0)  # is there already, and used now
    store.keep(7, 7)
    assert store.kept == [[2, 2], [0, 0], [7, 7]]
    assert store.prefixes.num_bytes == 30
    assert len(store.rows.closed) == 1


def test_one_that_goes_on_takes_the_place_of_its_beginning() -> None:
    store = Store()
    for ids in ([1, 2], [1, 2, 3, 4], [1, 2, 5]):
        store.keep(*ids)
    assert store.kept == [[1, 2, 3, 4], [1, 2, 5]]
    assert not store.keep(1, 2, 3)


def test_a_row_begins_with_the_longest_match_of_the_same_owner() -> None:
    store, other = Store(), object()
    for ids in ([1, 2, 3, 4], [9]):
        store.keep(*ids)
    store.keep(1, 2, 3, 4, 5, owner=other)
    wanted = to_ids([1, 2, 3, 9])
    assert store.prefixes.open_row(store.owner, wanted, more_than=3) is None
    row = store.prefixes.open_row(store.owner, wanted)
    assert row is not None
    assert row.length == 3
    assert store.kept[-1] == [1, 2, 3, 4]  # it was used last
    assert store.prefixes.open_row(store.owner, to_ids([8, 2])) is None


def test_rows_are_evicted_where_anything_else_needs_the_memory() -> None:
    store = Store()
    for i in range(6):
        store.keep(i)
    store.available = 35
    assert store.prefixes.shrink() == 30
    assert store.kept == [[3], [4], [5]]
    assert store.prefixes.shrink(wanted=15) == 20
    assert store.kept == [[5]]
    store.available = -1000
    assert store.prefixes.shrink() == 10
    assert not store.keep(7)
    assert store.prefixes.num_bytes == 0


def test_nothing_is_kept_where_others_are_short_of_memory() -> None:
    store = Store()
    for i in range(4):
        store.keep(i)
    store.short = 15
    assert not store.keep(7)
    assert store.kept == [[2], [3]]


def test_an_owner_that_goes_leaves_nothing() -> None:
    store, other = Store(), object()
    store.keep(1)
    store.keep(1, owner=other)
    assert store.prefixes.bytes_of(other) == 10
    store.prefixes.drop(store.owner)
    assert (store.prefixes.num_bytes, store.prefixes.bytes_of(store.owner)) == (10, 0)


# In the engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("prefixes") / "model", max_length=CONTEXT)


def make_engine(backend: str, precision: str, **settings: Any) -> Engine:
    return Engine(Settings(memory_mib=96, backend=backend, precision=precision, **settings))


@pytest.fixture
def engine(model_dir: Path) -> Iterator[Engine]:
    made = make_engine("native", "int8")
    made.load("m", str(model_dir))
    yield made
    made.close()


def cached(request: Request) -> int:
    return request.wait().sequences[0].cached_tokens


def prompts(count: int) -> list[str]:
    """Korean texts many of which begin like one before, but for the last words."""
    rng = random.Random(SEED)  # noqa: S311
    made: list[str] = []
    for _ in range(count):
        begun = made[rng.randrange(len(made))] if made and rng.random() < 0.75 else ""
        text = begun[: rng.randrange(len(begun))] if rng.random() < 0.3 and begun else begun
        more = " ".join(rng.choices(SENTENCES, k=rng.randrange(1, 4)))
        made.append((text + " " + more)[:260].strip())
    return made


def answers(engine: Engine, texts: list[str]) -> list[Any]:
    """Greedy and drawn, alone and together with others, and each answer sent back once more."""
    found: list[Any] = []
    for at in range(0, len(texts), 4):
        requests = []
        for i, text in enumerate(texts[at : at + 4]):
            options: dict[str, Any] = {"max_new_tokens": 6 + i}
            if i % 2:
                options |= {"seed": at, "top_k": 40, "num_return_sequences": 1 + i}
            requests.append(Request(engine, "m", text, **options))
            if at % 8:
                requests[-1].wait()
        for text, request in zip(texts[at:], requests, strict=False):
            count = len(request.sequences)
            found.append([request.wait().ids(index) for index in range(count)])
            turn = f"{text} {request.text()} {SENTENCES[at % 7]}"
            found.append(Request(engine, "m", turn[:400], max_new_tokens=5).wait().ids())
    settle(engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "precision"), BACKENDS)
def test_texts_are_what_they_are_without_what_is_kept(
    model_dir: Path, backend: str, precision: str
) -> None:
    texts = prompts(48)
    engines = [make_engine(backend, precision, prefix_cache_mib=mib) for mib in (0, 512)]
    for engine in engines:
        engine.load("m", str(model_dir))
    without, reusing = (answers(engine, texts) for engine in engines)
    assert reusing == without
    (never,), (often,) = (engine.models() for engine in engines)
    assert (never["cached_tokens"], never["prefix_bytes"]) == (0, 0)
    assert often["prompt_tokens"] == never["prompt_tokens"]
    assert often["cached_tokens"] > 0.3 * often["prompt_tokens"]
    assert often["prefix_bytes"] > 0
    for engine in engines:
        engine.close()


def test_a_prompt_that_begins_like_an_answered_one_computes_the_rest(engine: Engine) -> None:
    first = Request(engine, "m", " ".join(SENTENCES), max_new_tokens=3)
    assert cached(first) == 0
    settle(engine)
    again = Request(engine, "m", " ".join([*SENTENCES, *SENTENCES[:3]]), max_new_tokens=3)
    assert cached(again) == len(first.prompt)
    settle(engine)
    (found,) = engine.models()
    assert found["cached_tokens"] == cached(again)
    assert found["prefix_bytes"] == engine.statistics()["prefix_bytes"] > 0


def test_prompts_that_come_together_share_what_is_kept(engine: Engine) -> None:
    text = " ".join(SENTENCES)
    ids = Request(engine, "m", text, max_new_tokens=3).wait().prompt
    settle(engine)
    with Pause(engine):
        together = [Request(engine, "m", f"{text} {end}", max_new_tokens=30) for end in SENTENCES]
    assert min(cached(request) for request in together) >= len(ids)


def ask(engine: Engine, ids: list[int], new: int) -> Request:
    """A prompt of ids that no tokenizer cuts anew."""
    return Request(engine, "m", Raw(ids), max_new_tokens=new).wait()


def test_an_answer_that_comes_back_in_the_next_prompt_is_not_computed_again(
    engine: Engine, model_dir: Path
) -> None:
    plain = make_engine("native", "int8", prefix_cache_mib=0)
    plain.load("m", str(model_dir))
    rng = random.Random(SEED)  # noqa: S311
    for _ in range(3):  # chats
        history: list[int] = []
        for turn in range(4):
            before = len(history)
            history += [rng.randrange(4, 150) for _ in range(20)]
            request, without = (ask(one, history, 37) for one in (engine, plain))
            assert request.ids() == without.ids()
            assert cached(request) >= before - 1 if turn else cached(request) == 0
            history += request.ids()
            settle(engine)
    assert engine.models()[0]["kv_bytes"] == 0
    plain.close()


def test_a_prompt_whose_tokens_are_scored_is_computed_whole(engine: Engine) -> None:
    text = " ".join(SENTENCES)
    given: dict[str, Any] = {"max_new_tokens": 2, "decoder_input_details": True, "logprobs": 1}
    first = Request(engine, "m", text, **given).wait()
    settle(engine)
    Request(engine, "m", text, max_new_tokens=2).wait()
    settle(engine)
    again = Request(engine, "m", text, **given).wait()
    assert cached(again) == 0
    assert again.tokens[0].prefill == first.tokens[0].prefill


def test_an_unloaded_model_leaves_nothing_and_the_next_of_its_name_finds_nothing(
    engine: Engine, model_dir: Path
) -> None:
    text = " ".join(SENTENCES)
    Request(engine, "m", text, max_new_tokens=2).wait()
    settle(engine)
    assert engine.statistics()["prefix_bytes"] > 0
    engine.unload("m")
    assert engine.statistics()["prefix_bytes"] == 0
    engine.load("m", str(model_dir))
    assert cached(Request(engine, "m", text, max_new_tokens=2)) == 0


def test_another_models_load_has_the_memory_first(engine: Engine, model_dir: Path) -> None:
    Request(engine, "m", " ".join(SENTENCES), max_new_tokens=2).wait()
    settle(engine)
    (model,) = engine._models.values()
    row = model.core.row_bytes
    engine.budget.total_bytes = 2 * model.core.reserved_bytes + row
    engine.load("other", str(model_dir))
    assert engine.statistics()["prefix_bytes"] <= row
    assert Request(engine, "other", SENTENCES[0], max_new_tokens=2).wait().error is None
    assert {said["residency"] for said in engine.models()} == {"hot"}
    engine.budget.total_bytes = 2 * model.core.reserved_bytes + 1
    engine._prefixes.shrink()
    assert engine.statistics()["prefix_bytes"] == 0
