"""Answers with a form, beside others without, in a running engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from common.errors import (
    ArtifactError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
)
from common.form import Kind
from engine.backends.interface import Logits, Piece
from engine.engine import Engine
from engine.generation import MAX_SCORED_TOKENS
from engine.labels import MAX_LABEL_ROWS
from engine.native.arena import NativeRow
from engine.native.model import NativeModel
from engine.text import constraint
from tests.engine.conftest import NewEngine
from tests.engine.engines import WAIT_S, Pause, Request, settle, uncached_model
from tests.engine.hugging_face import EOS, make_hugging_face, write_json
from tests.engine.text.test_constraint import ENDLESS
from tests.lazy import mx
from tests.processes import eventually, has_ended

PROMPT = "오늘은 날씨가"
CHOICE = ["긍정", "부정", "중립", "긍정적이지 않다"]
LABELS = ["긍정", "부정", "긍정적이다", "산에는 꽃 피네"]
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
    folder = tmp_path_factory.mktemp("forms") / "model"
    return make_hugging_face(folder, kind="byte-level", max_length=256)


@pytest.fixture
def engine(folder: Path, new_engine: NewEngine) -> Engine:
    return new_engine({"m": folder}, max_rows=8, precision="fp32")


def ask(engine: Engine, max_new_tokens: int = 100, prompt: str = PROMPT, **given: Any) -> Request:
    return Request(engine, "m", prompt, max_new_tokens=max_new_tokens, **given)


def logprobs_of(folder: Path, ids: Sequence[int]) -> Any:
    """Log-probabilities (T, V) after each token, in one pass over the whole text."""
    logits = uncached_model(folder)(mx.nd.array(np.array(ids)[None])).asnumpy()[0]
    return logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))


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
    long = ask(engine, regex="가" * 60, max_new_tokens=200).wait()  # of more than one pass
    assert (long.text(), long.finish_reason()) == ("가" * 60, "stop")


def test_rows_with_and_without_a_form_share_passes_and_change_nothing(engine: Engine) -> None:
    wanted: list[dict[str, Any]] = [
        {"max_new_tokens": 12},
        {"json_schema": OBJECT},
        {"max_new_tokens": 12, "temperature": 1.0, "seed": 1},
        {"choice": CHOICE, "temperature": 1.0, "seed": 2},
        {"regex": "[가-힣 ]{4,9}[.!]", "repetition_penalty": 1.3},
    ]
    alone = [ask(engine, **given).wait().ids() for given in wanted]
    with Pause(engine):
        together = [ask(engine, **given) for given in wanted]
    assert [request.wait().ids() for request in together] == alone


def test_an_answer_ends_by_its_length_a_stop_text_or_its_end_token(engine: Engine) -> None:
    request = ask(engine, 7, json_schema=OBJECT).wait()
    assert (request.finish_reason(), len(request.ids())) == ("length", 7)
    assert request.text().startswith("{")
    assert ask(engine, 5, regex="가{80}").wait().finish_reason() == "length"
    stopped = ask(engine, regex="abc다라def", stop=["라"]).wait()
    assert (stopped.text(), stopped.finish_reason()) == ("abc다", "stop")
    bias = {str(EOS): 100.0}
    request = ask(engine, regex="[가-힣]+", logit_bias=bias).wait()
    assert request.ids()[-1] == EOS
    assert re.fullmatch("[가-힣]{1,3}", request.text())  # a token may have several, none has none
    whole = ask(engine, regex="[가-힣]{1,5}", logit_bias=bias, ignore_eos=True).wait()
    assert re.fullmatch("[가-힣]{1,5}", whole.text())
    assert whole.finish_reason() == "stop"


def test_a_leading_space_is_no_part_of_an_answer(engine: Engine) -> None:
    table = engine._models["m"].texts._table
    space = next(i for i in range(len(table)) if table.piece(i) == b" ")
    request = ask(engine, choice=CHOICE, logit_bias={str(space): 100.0}).wait()
    assert request.ids()[0] == space
    assert request.text() in CHOICE


def test_a_wrong_form_ends_no_other_request(engine: Engine) -> None:
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


def process_of(engine: Engine, kind: Kind = "regex") -> psutil.Process:
    """The process of the only form of a kind."""
    processes = engine._models["m"].texts._vocabulary._processes
    (process,) = (process for form, process in processes.items() if form.kind == kind)
    return psutil.Process(eventually(lambda: process._child and process._child.pid))


def test_a_row_whose_mask_is_late_sits_out_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint, "MASKS_S", WAIT_S)
    given: dict[str, Any] = {"regex": "[가-힣 ]{9,}", "temperature": 1.0, "seed": 1}
    expected = ask(engine, 30, num_return_sequences=2, **given).wait()
    other = ask(engine, 30).wait().ids()
    process = process_of(engine)
    with Pause(engine):
        late = ask(engine, 30, num_return_sequences=2, **given)
        process.suspend()
    assert ask(engine, 30).wait().ids() == other
    assert ask(engine, 30).wait().ids() == other
    assert not late.tokens  # not even those that are chosen
    process.resume()
    late.wait()
    assert [late.ids(i) for i in range(2)] == [expected.ids(i) for i in range(2)]


def test_an_answer_that_awaits_its_form_ends_with_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint, "MASKS_S", WAIT_S)
    ask(engine, 5, regex="[가-힣 ]{9,}").wait()
    process = process_of(engine)
    process.suspend()
    late = ask(engine, 30, regex="[가-힣 ]{9,}", timeout_s=0.2).wait()
    assert isinstance(late.error, DeadlineExceeded)
    cancelled = ask(engine, 30, regex="[가-힣 ]{9,}")
    engine.cancel(cancelled.sequences)
    eventually(lambda: not engine._models["m"].batch.has_work)
    assert engine.budget.kv_bytes == 0
    waiting = ask(engine, 30, regex="[가-힣 ]{9,}")
    engine.unload("m")
    assert isinstance(waiting.wait().error, ModelNotFound)
    eventually(lambda: has_ended(process))


def test_compiling_ends_with_the_request_or_the_model(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint, "COMPILE_S", WAIT_S)
    parameters = engine.parameters("m", {"json_schema": json.loads(ENDLESS.source[0])})
    for end in (Future.cancel, lambda _: engine.unload("m")):
        submitted = engine.submit("m", PROMPT, parameters, id)
        process = process_of(engine, "json_schema")
        assert ask(engine, choice=CHOICE).wait().text() in CHOICE
        end(submitted)
        eventually(partial(has_ended, process))
    with pytest.raises(ModelNotFound):
        submitted.result(WAIT_S)


def test_a_models_own_form_is_read_at_its_load(tmp_path: Path, engine: Engine) -> None:
    made = make_hugging_face(tmp_path / "labels", kind="byte-level")
    write_json(made / "generation.json", {"parameters": {"regex": "("}})
    with pytest.raises(ArtifactError, match=r"generation\.json: parameters\.regex: .*unclosed"):
        engine.load("wrong", str(made))
    assert [model["name"] for model in engine.models()] == ["m"]


# The probabilities of a choice's texts


def ways_of(engine: Engine, label: str) -> list[list[int]]:
    """The ids that write a label, without and with a leading space."""
    texts = engine._models["m"].texts
    return [texts._ids("tokenize", space + label, False) for space in ("", " ")]


def label_score(folder: Path, prompt: list[int], ways: list[list[int]]) -> float:
    """The log of the probability that one of `ways` follows."""
    found = []
    for way in ways:
        steps = logprobs_of(folder, [*prompt, *way])[len(prompt) - 1 : -1]
        found.append(steps[np.arange(len(way)), way].sum())
    return float(np.logaddexp.reduce(found))


def test_the_probabilities_of_a_choice_are_those_of_whole_texts(
    engine: Engine, folder: Path
) -> None:
    with Pause(engine):
        others = [ask(engine, 30), ask(engine, 30, temperature=1.0, seed=1)]
        request = ask(engine, choice=LABELS, choice_logprobs=True, logprobs=1)
    request.wait()
    scores = []
    for label in LABELS:
        ends = [EOS] if label == "긍정" else []  # which another label goes on from
        ways = [[*way, *ends] for way in ways_of(engine, label)]
        scores.append(label_score(folder, request.prompt, ways))
    expected = np.array(scores) - np.logaddexp.reduce(scores)
    found = request.tokens[-1].choices
    assert [text for text, _ in found] == [LABELS[i] for i in np.argsort(-expected)]
    for text, logprob in found:
        assert logprob == pytest.approx(expected[LABELS.index(text)], abs=2e-3)
    assert (request.text(), request.finish_reason()) == (found[0][0], "stop")
    for i, token in enumerate(request.tokens):
        assert token.logprobs is not None
        one = label_score(folder, [*request.prompt, *request.ids()[:i]], [[token.id]])
        assert token.logprobs.chosen == pytest.approx(one, abs=2e-3)
    alone = [ask(engine, 30).wait().ids(), ask(engine, 30, temperature=1.0, seed=1).wait().ids()]
    assert [other.wait().ids() for other in others] == alone
    again = ask(engine, choice=LABELS, choice_logprobs=True).wait()
    assert again.sequences[0].cached_tokens > 0
    assert dict(again.tokens[-1].choices) == pytest.approx(dict(found), abs=1e-6)


@pytest.fixture
def passes(engine: Engine) -> Iterator[list[list[int]]]:
    """The tokens of each piece of each pass. Keys and values are within what is reserved."""
    compute = engine._models["m"].core.compute
    assert isinstance(compute, NativeModel)
    arena, run, found = compute._arena, compute.run, list[list[int]]()

    def bytes_in_use() -> int:
        return int(np.count_nonzero(arena._references)) * arena.page_bytes

    def recorded(pieces: Sequence[Piece]) -> Logits:
        found.append([len(piece.ids) for piece in pieces])
        logits = run(pieces)
        assert 0 < bytes_in_use() <= engine.budget.kv_bytes + engine._prefixes.num_bytes
        return logits

    compute.run = recorded  # type: ignore[method-assign]
    yield found
    settle(engine)
    engine._prefixes.shrink(1 << 40)
    assert (bytes_in_use(), engine.budget.kv_bytes, compute.kv_bytes) == (0, 0, 0)


def test_labels_are_scored_together_in_one_pass(engine: Engine, passes: list[list[int]]) -> None:
    """Labels of one token need no row of their own; those that begin alike share one."""
    labels = ["긍정", "부정", "중립", "산에는 꽃"]
    ask(engine, choice=labels, choice_logprobs=True).wait()
    ways = [way for label in labels for way in ways_of(engine, label)]
    longest = {
        tuple(way[:-1])
        for way in ways
        if not any(len(o) > len(way) and o[: len(way) - 1] == way[:-1] for o in ways)
    }
    assert len(passes) == 2  # the prompt but for its last token, and that with each label
    assert sorted(passes[-1]) == sorted(len(path) + 1 for path in longest)
    passes.clear()
    ask(engine, choice=labels, choice_logprobs=True).wait()
    assert len(passes) == 1  # the prompt is in the prefix cache
    passes.clear()
    many = [f"{i}번 산에는 꽃 피네 꽃이 피네" for i in range(40)]
    wide = ask(engine, 100, choice=many, choice_logprobs=True, prompt="꽃이 피네 " * 20).wait()
    assert len(wide.tokens[-1].choices) == 40
    for pieces in passes:
        assert len(pieces) <= MAX_LABEL_ROWS
        assert sum(pieces) <= MAX_SCORED_TOKENS or len(pieces) == 1


def test_labels_are_scored_one_by_one_where_memory_is_short(
    engine: Engine, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ask(engine, choice=LABELS, choice_logprobs=True).wait().tokens[-1].choices
    passes.clear()

    def short(row: NativeRow, source: NativeRow, length: int) -> None:
        raise OutOfMemory("all pages of keys and values are in use")

    with Pause(engine) as pause:
        again = ask(engine, choice=LABELS, choice_logprobs=True)
        engine._prefixes.shrink(1 << 40)
        monkeypatch.setattr(NativeRow, "begin_with", short)
        pause.go_on()
        assert again.wait().tokens[-1].choices == wanted
    assert len(passes) > 2
    assert {len(pieces) for pieces in passes} == {1}


def test_a_label_is_drawn_by_its_probability_and_cut_by_its_length(engine: Engine) -> None:
    given: dict[str, Any] = {"choice": ["가", "나", "다"], "choice_logprobs": True}
    drawn = [ask(engine, temperature=3.0, seed=seed, **given).wait().text() for seed in range(30)]
    assert {*drawn} == {"가", "나", "다"}
    assert ask(engine, temperature=3.0, seed=7, **given).wait().text() == drawn[7]
    request = ask(engine, 1, choice=["긍정적이지 않다"], choice_logprobs=True).wait()
    assert (len(request.ids()), request.finish_reason()) == (1, "length")
    assert request.tokens[-1].choices == [("긍정적이지 않다", pytest.approx(0.0))]


def test_probabilities_that_cannot_be_computed_are_refused(engine: Engine) -> None:
    for given, message in (
        ({}, "needs parameters.choice"),
        ({"regex": "a"}, "needs parameters.choice"),
        ({"choice": [str(i) for i in range(65)]}, "at most 64 texts; choice has 65"),
        ({"choice": ["a"], "temperature": 1.0, "num_return_sequences": 2}, "num_return_sequences"),
        ({"choice": ["a"], "decoder_input_details": True}, "decoder_input_details"),
        ({"choice": ["가" * 300]}, "tokens, and the prompt"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            ask(engine, choice_logprobs=True, **given)
