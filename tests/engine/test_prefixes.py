"""What is kept of prompts that were answered, for how long, and that no text shows it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.prefixes import Prefix, Prefixes, shared
from engine.registry import Engine
from engine.settings import Settings
from engine.text.prompts import Raw
from tests.engine.engines import Pause, Request, make_talkative, settle, until
from tests.engine.sentences import SENTENCES

CONTEXT = 512
SEED = 20
BACKENDS = (("mxnet", "fp32"), ("mxnet", "int8"), ("onnxruntime", "fp32"), ("onnxruntime", "int8"))


def test_what_two_prompts_share_is_counted_in_whole_pieces() -> None:
    ids = list(range(100))
    assert shared(ids, ids, 16) == 96
    assert shared(ids, [*ids[:40], 7, *ids[41:]], 16) == 32
    assert shared(ids, ids[:15], 16) == 0
    assert shared([], ids, 16) == 0


@dataclass
class Bytes:
    num_bytes: int


class Store:
    """Of one owner, ten bytes for each thing kept."""

    def __init__(self, limit: int = 100) -> None:
        self.room, self.short = limit, 0
        self.prefixes = Prefixes(limit, lambda: self.room, lambda: self.short)
        self.owner = object()

    def keep(self, *ids: int, owner: object = None) -> bool:
        owner = owner or self.owner
        if not self.prefixes.wants(owner, list(ids), 10):
            return False
        self.prefixes.add(Prefix(owner, list(ids), Bytes(10)))
        return True

    @property
    def kept(self) -> list[list[int]]:
        """What was used last is last."""
        return [prefix.ids for prefix in self.prefixes._found]


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = Store(limit=30)
    for i in range(3):
        store.keep(i, i)
    assert not store.keep(0)  # is there already, and used now
    store.keep(7, 7)
    assert store.kept == [[2, 2], [0, 0], [7, 7]]
    assert store.prefixes.num_bytes == 30


def test_one_that_goes_on_takes_the_place_of_its_beginning() -> None:
    store = Store()
    for ids in ([1, 2], [1, 2, 3, 4], [1, 2, 5]):
        store.keep(*ids)
    assert store.kept == [[1, 2, 3, 4], [1, 2, 5]]
    assert not store.keep(1, 2, 3)


def test_the_longest_match_is_found_and_only_of_the_same_owner() -> None:
    store, other = Store(), object()
    for ids in ([1, 2, 3, 4], [9]):
        store.keep(*ids)
    store.keep(1, 2, 3, 4, 5, owner=other)
    found, length = store.prefixes.longest(store.owner, [1, 2, 3, 9], 1)
    assert found is not None
    assert (found.ids, length) == ([1, 2, 3, 4], 3)
    assert store.kept[-1] == found.ids  # it was used last
    assert store.prefixes.longest(store.owner, [8, 2], 1) == (None, 0)
    assert store.prefixes.take(found)
    assert not store.prefixes.take(found)  # somebody else has it
    assert store.prefixes.num_bytes == 20


def test_whatever_else_needs_the_memory_has_it() -> None:
    store = Store()
    for i in range(6):
        store.keep(i)
    store.room = 35
    assert store.prefixes.shrink() == 30
    assert store.kept == [[3], [4], [5]]
    assert store.prefixes.shrink(wanted=15) == 20
    assert store.kept == [[5]]
    store.room = -1000
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
    made = make_engine("onnxruntime", "int8")
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
    assert cached(again) == len(first.prompt) // 16 * 16
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
    assert [cached(request) for request in together] == [len(ids) // 16 * 16] * len(SENTENCES)


def ask(engine: Engine, ids: list[int], new: int) -> Request:
    """A prompt of ids that no tokenizer cuts anew."""
    return Request(engine, "m", Raw(ids), max_new_tokens=new).wait()


def rest(engine: Engine) -> None:
    """Waits until nothing is left to compute ahead. What is being completed stands nowhere
    meanwhile, so it is looked for between two turns."""
    settle(engine)
    while engine._prefixes.unfinished():
        until(lambda: not engine._prefixes.unfinished())
        settle(engine)


def test_an_answer_that_comes_back_is_computed_ahead_and_changes_no_text(
    engine: Engine, model_dir: Path
) -> None:
    """Once answers have come back, the next are made whole while nobody asks."""
    plain = make_engine("onnxruntime", "int8", prefix_cache_mib=0)
    plain.load("m", str(model_dir))
    rng = random.Random(SEED)  # noqa: S311
    seen = []
    for _ in range(3):  # chats
        history: list[int] = []
        for turn in range(4):
            history += [rng.randrange(4, 150) for _ in range(20)]
            request, without = (ask(one, history, 37) for one in (engine, plain))
            assert request.ids() == without.ids()
            seen.append((turn, len(history) - cached(request)))
            history += request.ids()
            rest(engine)
    # Of the first chat an answer has to come back before they are.
    assert [new for turn, new in seen[4:] if turn] == pytest.approx([28] * 6, abs=8)
    assert engine.models()[0]["kv_bytes"] == 0
    plain.close()


def test_a_model_can_be_unloaded_while_an_answer_is_computed_ahead(engine: Engine) -> None:
    (model,) = engine._models.values()
    model.batch._comes_back = True
    ask(engine, [5] * 40, 300)
    engine.unload("m")
    assert engine.statistics()["prefix_bytes"] == 0
    assert not engine.models()
    assert engine.health()["status"] == "ok"


def test_a_prompt_whose_tokens_are_scored_is_computed_whole(engine: Engine) -> None:
    text = " ".join(SENTENCES)
    given: dict[str, Any] = {"max_new_tokens": 2, "decoder_input_details": True, "logprobs": 1}
    first = Request(engine, "m", text, **given).wait()
    settle(engine)
    assert engine.statistics()["prefix_bytes"] == 0
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
    kept = engine.statistics()["prefix_bytes"]
    row = model.row_bytes
    engine.budget.total_bytes = 2 * model.reserved_bytes + row
    engine.load("other", str(model_dir))
    assert engine.statistics()["prefix_bytes"] <= row
    assert Request(engine, "other", SENTENCES[0], max_new_tokens=2).wait().error is None
    assert {said["residency"] for said in engine.models()} == {"hot"}
    engine.budget.total_bytes = 2 * model.reserved_bytes + kept // 100
    engine._prefixes.shrink()
    assert engine.statistics()["prefix_bytes"] == 0
