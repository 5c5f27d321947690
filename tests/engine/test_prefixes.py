"""The prefix cache: what it holds and for how long, and that texts are the same without it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.engine import Engine
from engine.prefixes import TOKEN, Prefix, Prefixes, key_of, shared_length
from engine.text.prompts import Raw
from tests.engine.conftest import NewEngine
from tests.engine.engines import Pause, Request, make_talkative, settle
from tests.engine.sentences import SENTENCES

SEED = 20
TEXT = " ".join(SENTENCES)


@dataclass
class Row:
    length: int
    num_bytes: int = 10


class Cache:
    """A cache of rows of ten bytes; stands in for their model, too."""

    def __init__(self, limit: int = 100) -> None:
        self.available, self.shortage = limit, 0
        self.prefixes = Prefixes(limit, lambda: self.available, lambda: self.shortage)
        self.owner = object()
        self.closed: list[Row] = []

    def open_row(self, source: Row, length: int) -> Row:
        return Row(length)

    def close_row(self, row: Row) -> None:
        self.closed.append(row)

    def add(self, *ids: int, owner: object = None) -> bool:
        row: Any = Row(len(ids))
        model: Any = self
        return self.prefixes.add(Prefix(owner or self.owner, key_of(ids), row, model))

    @property
    def cached(self) -> list[list[int]]:
        """The least recently used is first."""
        return [np.frombuffer(p.key, TOKEN).tolist() for p in self.prefixes._prefixes]


def test_the_least_recently_used_row_is_evicted_and_closed() -> None:
    cache = Cache(limit=30)
    for i in range(3):
        cache.add(i, i)
    assert not cache.add(0)  # is there already, and used now
    cache.add(7, 7)
    assert cache.cached == [[2, 2], [0, 0], [7, 7]]
    assert (cache.prefixes.num_bytes, len(cache.closed)) == (30, 1)


def test_a_row_takes_the_place_of_its_own_prefix() -> None:
    cache = Cache()
    for ids in ([1, 2], [1, 2, 3, 4], [1, 2, 5]):
        cache.add(*ids)
    assert cache.cached == [[1, 2, 3, 4], [1, 2, 5]]
    assert not cache.add(1, 2, 3)


def test_a_row_begins_with_the_longest_match_of_the_same_owner() -> None:
    cache, other = Cache(), object()
    for ids in ([1, 2, 3, 4], [9]):
        cache.add(*ids)
    cache.add(1, 2, 3, 4, 5, owner=other)
    wanted = key_of([1, 2, 3, 9])
    assert cache.prefixes.open_row(cache.owner, wanted, more_than=3) is None
    row = cache.prefixes.open_row(cache.owner, wanted)
    assert row is not None
    assert row.length == 3
    assert cache.cached[-1] == [1, 2, 3, 4]  # it was used last
    assert cache.prefixes.open_row(cache.owner, key_of([8, 2])) is None
    assert cache.prefixes.bytes_of(other) == 10
    cache.prefixes.drop(cache.owner)
    assert (cache.prefixes.num_bytes, cache.prefixes.bytes_of(cache.owner)) == (10, 0)


def test_rows_are_evicted_where_anything_else_needs_the_memory() -> None:
    cache = Cache()
    for i in range(6):
        cache.add(i)
    cache.available = 35
    assert cache.prefixes.shrink() == 30
    assert cache.cached == [[3], [4], [5]]
    cache.shortage = 15
    assert not cache.add(7)
    assert cache.cached == [[5]]
    cache.available = -1000
    assert cache.prefixes.shrink() == 10
    assert not cache.add(7)
    assert cache.prefixes.num_bytes == 0


def test_the_longest_match_takes_two_comparisons_and_is_that_of_a_search_through_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, cache, compared = random.Random(SEED), Cache(limit=3000), [0]  # noqa: S311

    def counted(a: bytes, b: bytes) -> int:
        compared[0] += 1
        return shared_length(a, b)

    monkeypatch.setattr("engine.prefixes.shared_length", counted)
    owners = [object(), object()]
    for _ in range(2000):
        # Few ids that differ in all bytes, so that many lists begin alike.
        ids = rng.choices([0, 1, 255, 256, 51_199], k=rng.randrange(1, 40))
        owner, wanted = rng.choice(owners), key_of(ids)
        keys = [p.key for p in cache.prefixes._prefixes if p.owner is owner]
        longest = max((shared_length(key, wanted) for key in keys), default=0)
        compared[0] = 0
        row = cache.prefixes.open_row(owner, wanted)
        assert (row.length if row else 0) == longest
        assert compared[0] <= 2
        held = any(key.startswith(wanted) for key in keys)
        assert cache.add(*ids, owner=owner) is not held
        kept = {p.key for p in cache.prefixes._prefixes if p.owner is owner}
        assert not any(wanted.startswith(key) for key in kept - {wanted})
    assert len(cache.cached) == 300
    for owner in owners:
        cache.prefixes.drop(owner)
    assert (cache.prefixes.num_bytes, cache.prefixes._sorted) == (0, {})


# In the engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_talkative(tmp_path_factory.mktemp("prefixes") / "model", max_length=512))


def start(new_engine: NewEngine, model_dir: str, mib: int, **settings: Any) -> Engine:
    options = {"backend": "native", "precision": "int8", **settings}
    return new_engine({"m": model_dir}, memory_mib=96, prefix_cache_mib=mib, **options)


@pytest.fixture
def engine(new_engine: NewEngine, model_dir: str) -> Engine:
    return start(new_engine, model_dir, 512)


def ask(engine: Engine, text: Any = TEXT, new: int = 2, **given: Any) -> Request:
    request = Request(engine, "m", text, max_new_tokens=new, **given).wait()
    settle(engine)  # its row is cached after it was answered
    return request


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
@pytest.mark.parametrize(("backend", "precision"), [("mxnet", "int8"), ("native", "fp32")])
def test_texts_are_those_without_the_cache(
    model_dir: str, new_engine: NewEngine, backend: str, precision: str
) -> None:
    without, caching = (
        start(new_engine, model_dir, mib, backend=backend, precision=precision) for mib in (0, 512)
    )
    texts = prompts(24)
    assert answers(caching, texts) == answers(without, texts)
    (never,), (often,) = without.models(), caching.models()
    assert (never["cached_tokens"], never["prefix_bytes"]) == (0, 0)
    assert often["prompt_tokens"] == never["prompt_tokens"]
    assert often["cached_tokens"] > 0.3 * often["prompt_tokens"]
    assert often["prefix_bytes"] > 0


def test_a_prompt_that_begins_like_an_answered_one_computes_the_rest(engine: Engine) -> None:
    first = ask(engine)
    assert cached(first) == 0
    again = ask(engine, " ".join([TEXT, *SENTENCES[:3]]))
    assert cached(again) == len(first.prompt)
    (found,) = engine.models()
    assert found["cached_tokens"] == cached(again)
    assert found["prefix_bytes"] == engine.statistics()["prefix_bytes"] > 0
    with Pause(engine):
        together = [Request(engine, "m", f"{TEXT} {s}", max_new_tokens=30) for s in SENTENCES]
    assert min(map(cached, together)) >= len(first.prompt)
    # Nor is an answer that comes back in the next prompt, but for its last token.
    history = [*again.prompt, *again.ids()]
    assert cached(ask(engine, Raw([*history, 9, 8]))) == len(history) - 1


def test_a_prompt_whose_tokens_are_scored_is_computed_whole(engine: Engine) -> None:
    first = ask(engine, decoder_input_details=True, logprobs=1)
    ask(engine)
    again = ask(engine, decoder_input_details=True, logprobs=1)
    assert cached(again) == 0
    assert again.tokens[0].prefill == first.tokens[0].prefill


def test_an_unloaded_model_leaves_nothing_and_the_next_of_its_name_finds_nothing(
    engine: Engine, model_dir: str
) -> None:
    ask(engine)
    assert engine.statistics()["prefix_bytes"] > 0
    engine.unload("m")
    assert engine.statistics()["prefix_bytes"] == 0
    engine.load("m", model_dir)
    assert cached(ask(engine)) == 0


def test_a_model_finds_nothing_of_anothers_prompts(engine: Engine, model_dir: str) -> None:
    engine.load("n", model_dir)  # of the same files
    ask(engine)
    other = Request(engine, "n", TEXT, max_new_tokens=2)
    assert cached(other) == 0
    assert other.ids() == ask(engine).ids()
    assert cached(ask(engine)) > 0


def test_another_models_load_has_the_memory_first(engine: Engine, model_dir: str) -> None:
    ask(engine)
    (model,) = engine._models.values()
    row, size = model.core.row_bytes, model.core.reserved_bytes
    engine.budget.total_bytes = 2 * size + row
    engine.load("other", model_dir)
    assert engine.statistics()["prefix_bytes"] <= row
    assert Request(engine, "other", SENTENCES[0], max_new_tokens=2).wait().error is None
    assert {model["residency"] for model in engine.models()} == {"hot"}
    engine.budget.total_bytes = 2 * size + 1
    engine._prefixes.shrink()
    assert engine.statistics()["prefix_bytes"] == 0
