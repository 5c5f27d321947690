"""Answers that are held to a form, beside others that are not, in a running engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError, InvalidRequest, OutOfMemory
from common.mxnet_compat import mx
from engine.backends.interface import Logits, Piece
from engine.engine import Engine
from engine.native.arena import NativeRow
from engine.native.model import NativeModel
from engine.scheduler import MAX_LABEL_ROWS, MAX_SCORED_TOKENS
from engine.settings import Settings
from tests.engine.conftest import NewEngine
from tests.engine.engines import Pause, Request, uncached_model
from tests.engine.hugging_face import EOS, make_hugging_face, write_json

PROMPT = "오늘은 날씨가"
LABELS = ["긍정", "부정", "중립", "긍정적이지 않다"]
OBJECT = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": ["긍정", "부정"]},
        "certain": {"type": "boolean"},
        "words": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["sentiment", "certain", "words"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hugging_face(
        tmp_path_factory.mktemp("forms") / "model", kind="byte-level", max_length=256
    )


@pytest.fixture
def engine(folder: Path, new_engine: NewEngine) -> Engine:
    made = new_engine(memory_mib=64, max_rows=8, precision="fp32")
    made.load("m", str(folder))
    return made


def ask(engine: Engine, max_new_tokens: int = 100, prompt: str = PROMPT, **given: Any) -> Request:
    return Request(engine, "m", prompt, max_new_tokens=max_new_tokens, **given)


def test_a_choice_is_the_likeliest_by_each_step(engine: Engine, folder: Path) -> None:
    """Greedy among the tokens that some label may go on with, in the logits of the whole text."""
    request = ask(engine, choice=LABELS).wait()
    table, model = engine._models["m"].texts._table, uncached_model(folder)
    ids = list(request.prompt)
    texts = [space + label for label in LABELS for space in ("", " ")]
    while (so_far := table.text(ids[len(request.prompt) :]).encode()) not in map(str.encode, texts):
        logits = model(mx.nd.array(np.array([ids]))).asnumpy()[0, -1]
        pieces = [table.piece(token) for token in range(len(table))]
        fits = [
            bool(piece)
            and not table.is_silent(token)
            and any(text.encode().startswith(_bytes(table, ids, request) + piece) for text in texts)
            for token, piece in enumerate(pieces)
        ]
        ids.append(int(np.where(fits, logits[: len(pieces)], -np.inf).argmax()))
    assert request.ids()[: len(ids) - len(request.prompt)] == ids[len(request.prompt) :]
    assert request.text() in LABELS
    assert so_far.decode().strip() == request.text() or request.text().startswith("긍정")
    assert request.finish_reason() == "stop"


def _bytes(table: Any, ids: list[int], request: Request) -> bytes:
    return b"".join(map(table.piece, ids[len(request.prompt) :]))


def test_drawn_answers_of_one_request_each_have_the_form(engine: Engine) -> None:
    request = ask(engine, json_schema=OBJECT, temperature=2.0, num_return_sequences=6, seed=5)
    request.wait()
    found = [json.loads(request.text(index)) for index in range(6)]
    assert all(list(value) == OBJECT["required"] for value in found)
    assert len({str(value) for value in found}) > 1
    assert {request.finish_reason(index) for index in range(6)} == {"stop"}


def test_forced_tokens_take_no_step_of_their_own(engine: Engine) -> None:
    text = "정확히 이렇게 답합니다"
    counters = engine._models["m"].statistics
    request = ask(engine, regex=text).wait()
    assert request.text() == text
    assert counters.steps < len(request.ids()) - 1
    before = counters.steps
    scored = ask(engine, regex=text, logprobs=0).wait()  # a log-probability takes a step
    assert scored.ids() == request.ids()
    assert counters.steps - before == len(scored.ids()) - 1
    drawn = {
        ask(engine, regex="[ab]{5}" + text, temperature=1.5, seed=3, **given).wait().text()
        for given in ({}, {"logprobs": 0})
    }
    assert len(drawn) == 1


def test_what_is_forced_comes_in_passes_that_others_wait_little_for(engine: Engine) -> None:
    text = "가" * 60  # three bytes each, of which some are tokens
    request = ask(engine, regex=text, max_new_tokens=200).wait()
    assert request.text() == text
    assert request.finish_reason() == "stop"


def test_rows_with_and_without_a_form_share_passes_and_change_nothing(engine: Engine) -> None:
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 12},
        {"json_schema": OBJECT},
        {"max_new_tokens": 12, "temperature": 1.0, "seed": 1},
        {"choice": LABELS, "temperature": 1.0, "seed": 2},
        {"regex": "[가-힣 ]{4,9}[.!]", "repetition_penalty": 1.3},
    ]
    alone = [ask(engine, **given).wait().ids() for given in asked]
    with Pause(engine):
        together = [ask(engine, **given) for given in asked]
    assert [request.wait().ids() for request in together] == alone


def test_an_answer_that_its_length_cuts_off_says_so(engine: Engine) -> None:
    request = ask(engine, 7, json_schema=OBJECT).wait()
    assert request.finish_reason() == "length"
    assert len(request.ids()) == 7
    assert request.text().startswith("{")
    assert ask(engine, 5, regex="가{80}").wait().finish_reason() == "length"


def test_a_form_that_may_go_on_ends_with_the_end_token_or_by_its_own_end(engine: Engine) -> None:
    bias = {str(EOS): 100.0}
    request = ask(engine, regex="[가-힣]+", logit_bias=bias).wait()
    assert request.ids()[-1] == EOS
    assert re.fullmatch("[가-힣]{1,3}", request.text())  # a token may have several, none has none
    whole = ask(engine, regex="[가-힣]{1,5}", logit_bias=bias, ignore_eos=True).wait()
    assert re.fullmatch("[가-힣]{1,5}", whole.text())
    assert whole.finish_reason() == "stop"


def test_a_stop_text_ends_it_before(engine: Engine) -> None:
    request = ask(engine, regex="abc다라def", stop=["라"]).wait()
    assert (request.text(), request.finish_reason()) == ("abc다", "stop")


def test_log_probabilities_are_the_models_own(engine: Engine, folder: Path) -> None:
    request = ask(engine, choice=LABELS, logprobs=3).wait()
    model = uncached_model(folder)
    whole = np.array([*request.prompt, *request.ids()])[None, :]
    logits = model(mx.nd.array(whole)).asnumpy()[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for i, token in enumerate(request.tokens):
        assert token.logprobs is not None
        expected = logprobs[len(request.prompt) - 1 + i]
        assert token.logprobs.chosen == pytest.approx(expected[token.id], abs=1e-3)
        assert [t for t, _ in token.logprobs.top] == list(np.argsort(-expected)[:3])


def test_a_leading_space_is_no_part_of_an_answer(engine: Engine) -> None:
    table = engine._models["m"].texts._table
    space = next(i for i in range(len(table)) if table.piece(i) == b" ")
    request = ask(engine, choice=LABELS, logit_bias={str(space): 100.0}).wait()
    assert request.ids()[0] == space
    assert request.text() in LABELS


def test_a_request_whose_form_is_wrong_harms_nobody(engine: Engine) -> None:
    expected = ask(engine, 20).wait().ids()
    with Pause(engine):
        other = ask(engine, 20)
        with pytest.raises(InvalidRequest, match=r"parameters\.regex: .*unclosed group"):
            ask(engine, regex="(")
        # What begins well may become too complex: it ends that answer alone.
        complex_ = ask(engine, 200, regex="(.*a.{200})|(.*b.{300})|([^c]*c.{900})", temperature=9.0)
    assert other.wait().ids() == expected
    complex_.wait()
    assert complex_.error is None or isinstance(complex_.error, InvalidRequest)
    assert ask(engine, 20).wait().ids() == expected


def test_a_models_own_form_is_its_requests_default(
    folder: Path, tmp_path: Path, new_engine: NewEngine
) -> None:
    made = make_hugging_face(tmp_path / "labels", kind="byte-level")
    write_json(made / "generation.json", {"parameters": {"choice": ["긍정", "부정"]}})
    engine = new_engine(memory_mib=64, precision="fp32")
    engine.load("m", str(made))

    def answer(**given: Any) -> str:
        return Request(engine, "m", PROMPT, max_new_tokens=8, **given).wait().text()

    assert answer() in ("긍정", "부정")
    assert answer(regex="[ab]{3}") in {f"{a}{b}{c}" for a in "ab" for b in "ab" for c in "ab"}
    assert answer(choice=[]) not in ("긍정", "부정")
    write_json(made / "generation.json", {"parameters": {"regex": "("}})
    with pytest.raises(ArtifactError, match=r"generation\.json: parameters\.regex: .*unclosed"):
        engine.load("wrong", str(made))
    assert [model["name"] for model in engine.models()] == ["m"]


def label_scores(folder: Path, prompt: list[int], ways: list[list[int]]) -> float:
    """The log of the probability that one of `ways` follows, in one pass over each whole text."""
    model, found = uncached_model(folder), []
    for way in ways:
        logits = model(mx.nd.array(np.array([[*prompt, *way]]))).asnumpy()[0].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        steps = logprobs[len(prompt) - 1 : -1]
        found.append(steps[np.arange(len(way)), way].sum())
    return float(np.logaddexp.reduce(found))


def test_the_probabilities_of_a_choice_are_those_of_its_texts_as_a_whole(
    engine: Engine, folder: Path
) -> None:
    labels = ["긍정", "부정", "긍정적이다", "산에는 꽃 피네"]
    with Pause(engine):
        others = [ask(engine, 30), ask(engine, 30, temperature=1.0, seed=1)]
        request = ask(engine, choice=labels, choice_logprobs=True, logprobs=1)
    request.wait()
    texts = engine._models["m"].texts

    def ways(label: str) -> list[list[int]]:
        found = [texts._ids("tokenize", space + label, False) for space in ("", " ")]
        ends = [EOS] if label == "긍정" else []  # which another label goes on from
        return [[*way, *ends] for way in found]

    scores = np.array([label_scores(folder, request.prompt, ways(label)) for label in labels])
    expected = scores - np.logaddexp.reduce(scores)
    found = request.tokens[-1].choices
    assert [text for text, _ in found] == [labels[i] for i in np.argsort(-expected)]
    for text, logprob in found:
        assert logprob == pytest.approx(expected[labels.index(text)], abs=2e-3)
    assert (request.text(), request.finish_reason()) == (found[0][0], "stop")
    for i, token in enumerate(request.tokens):
        assert token.logprobs is not None
        prefix = [*request.prompt, *request.ids()[:i]]
        one = label_scores(folder, prefix, [[token.id]])
        assert token.logprobs.chosen == pytest.approx(one, abs=2e-3)
    alone = [ask(engine, 30).wait().ids(), ask(engine, 30, temperature=1.0, seed=1).wait().ids()]
    assert [other.wait().ids() for other in others] == alone
    again = ask(engine, choice=labels, choice_logprobs=True).wait()  # on a kept prefix
    assert again.sequences[0].cached_tokens > 0
    assert dict(again.tokens[-1].choices) == pytest.approx(dict(found), abs=1e-6)


def record_passes(engine: Engine) -> list[list[int]]:
    """The tokens of each piece of each pass that the model runs from now on."""
    compute = engine._models["m"].core.compute
    assert compute is not None
    passes: list[list[int]] = []
    run = compute.run

    def recorded(pieces: Sequence[Piece]) -> Logits:
        passes.append([len(piece.ids) for piece in pieces])
        return run(pieces)

    compute.run = recorded  # type: ignore[method-assign]
    return passes


def test_labels_are_scored_beside_each_other_in_one_pass(engine: Engine) -> None:
    """Labels of one token need no row of their own; those that begin alike share one."""
    passes = record_passes(engine)
    labels = ["긍정", "부정", "중립", "산에는 꽃"]
    first = ask(engine, choice=labels, choice_logprobs=True).wait()
    texts = engine._models["m"].texts
    ways = [texts._ids("tokenize", s + label, False) for label in labels for s in ("", " ")]
    longest = {
        tuple(way[:-1])
        for way in ways
        if not any(len(o) > len(way) and o[: len(way) - 1] == way[:-1] for o in ways)
    }
    assert len(passes) == 2  # the prompt but for its last token, and that with each label
    assert sorted(passes[-1]) == sorted(len(path) + 1 for path in longest)
    del passes[:]
    ask(engine, choice=labels, choice_logprobs=True, prompt=PROMPT).wait()
    assert len(passes) == 1  # the prompt is in the prefix cache
    many = [f"{i}번 산에는 꽃 피네 꽃이 피네" for i in range(40)]
    del passes[:]
    wide = ask(engine, 100, choice=many, choice_logprobs=True).wait()
    assert len(wide.tokens[-1].choices) == 40
    for pieces in passes:
        assert len(pieces) <= MAX_LABEL_ROWS
        assert sum(pieces) <= MAX_SCORED_TOKENS or len(pieces) == 1
    assert first.text() in labels


def test_rows_of_labels_are_reserved_and_closed(folder: Path) -> None:
    engine = Engine(Settings(memory_mib=64, precision="fp32", prefix_cache_mib=0))
    engine.load("m", str(folder))
    compute = engine._models["m"].core.compute
    assert isinstance(compute, NativeModel)
    arena, run = compute._arena, compute.run
    used: list[int] = []

    def bytes_in_use() -> int:
        return int(np.count_nonzero(arena._references)) * arena.page_bytes

    def measured(pieces: Sequence[Piece]) -> Logits:
        found = run(pieces)
        used.append(bytes_in_use())
        assert used[-1] <= engine.budget.kv_bytes
        return found

    compute.run = measured  # type: ignore[method-assign]
    for prompt in (PROMPT, "꽃이 피네 " * 20):
        labels = ["긍정", "부정", "중립", "산에는 꽃"]
        ask(engine, prompt=prompt, choice=labels, choice_logprobs=True).wait()
    engine._loop.call(lambda: None)  # after the last pass
    assert max(used) > min(used) > 0
    assert (bytes_in_use(), engine.budget.kv_bytes, compute.kv_bytes) == (0, 0, 0)
    engine.close()


def test_labels_are_scored_one_by_one_where_memory_is_short(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = ["긍정", "부정", "중립", "산에는 꽃"]
    wanted = ask(engine, choice=labels, choice_logprobs=True).wait().tokens[-1].choices
    passes = record_passes(engine)

    def short(row: NativeRow, source: NativeRow, length: int) -> None:
        raise OutOfMemory("all pages of keys and values are in use")

    with Pause(engine) as pause:
        again = ask(engine, choice=labels, choice_logprobs=True, prompt=PROMPT)
        engine._prefixes.shrink(1 << 40)
        monkeypatch.setattr(NativeRow, "begin_with", short)
        pause.go_on()
        assert again.wait().tokens[-1].choices == wanted
    assert len(passes) > 2
    assert {len(pieces) for pieces in passes} == {1}


def test_a_label_is_drawn_by_its_probability(engine: Engine) -> None:
    given: dict[str, Any] = {"choice": ["가", "나", "다"], "choice_logprobs": True}
    drawn = [ask(engine, temperature=3.0, seed=seed, **given).wait().text() for seed in range(30)]
    assert {*drawn} == {"가", "나", "다"}
    assert ask(engine, temperature=3.0, seed=7, **given).wait().text() == drawn[7]


def test_an_answer_with_probabilities_is_cut_by_its_length_as_any_other(engine: Engine) -> None:
    request = ask(engine, 1, choice=["긍정적이지 않다"], choice_logprobs=True).wait()
    assert len(request.ids()) == 1
    assert request.finish_reason() == "length"
    assert request.tokens[-1].choices == [("긍정적이지 않다", pytest.approx(0.0))]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs parameters.choice"),
        ({"regex": "a"}, "needs parameters.choice"),
        ({"choice": [str(i) for i in range(65)]}, "at most 64 texts; choice has 65"),
        ({"choice": ["a"], "temperature": 1.0, "num_return_sequences": 2}, "num_return_sequences"),
        ({"choice": ["a"], "decoder_input_details": True}, "decoder_input_details"),
        ({"choice": ["가" * 300]}, "tokens, and the prompt"),
    ],
)
def test_probabilities_that_cannot_be_told_are_refused(
    engine: Engine, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ask(engine, choice_logprobs=True, **given)
