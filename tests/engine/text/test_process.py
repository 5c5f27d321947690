"""A model's texts are made in a process that may stall, crash or end; no other model notices."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

import engine.text.process
import engine.text.texts
from common.errors import (
    ArtifactError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from common.form import Form
from engine.engine import Engine
from engine.sequence import Sequence
from engine.text.process import About, TextProcesses, Turns
from engine.text.table import RUNS, Table
from engine.text.texts import Texts
from tests.engine.conftest import NewEngine
from tests.engine.engines import WAIT_S, Gate, Pause, Request, Result, make_talkative
from tests.engine.hugging_face import EOS, make_hugging_face, write_json
from tests.engine.sandbox import targets
from tests.engine.text.opened import texts_of
from tests.processes import eventually, has_ended

PROMPT = "오늘은 날씨가"
DECODED = "char-bpe"  # its pieces, joined, are not its text
GO_ON = {str(EOS): -100}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("texts") / "good", max_length=256)


@pytest.fixture
def engine_(new_engine: NewEngine) -> Engine:
    return new_engine()


@pytest.fixture
def pool() -> Iterator[TextProcesses]:
    made = TextProcesses()
    yield made
    made.close()


def ask(engine: Engine, new: int = 5, name: str = "m", **given: Any) -> Request:
    return Request(engine, name, PROMPT, max_new_tokens=new, **given)


def encode(texts: Texts, prompt: str = PROMPT) -> list[int]:
    return texts.soon(lambda: texts.encode(prompt)).result(WAIT_S)


def copy_of(good: Path, path: Path, **files: str) -> Path:
    shutil.copytree(good, path)
    for name, content in files.items():
        (path / name).write_text(content, encoding="utf-8")
    return path


def hugging_face(path: Path, change: Callable[[Tokenizer], None]) -> Path:
    folder = make_hugging_face(path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def child(engine: Engine, name: str = "m") -> int:
    pid = engine._models[name].texts._process.pid
    assert pid is not None
    return pid


# Models of one tokenizer share a process


def test_models_of_one_tokenizer_have_one_process(good: Path, pool: TextProcesses) -> None:
    before = len(psutil.Process().children(recursive=True))
    with ExitStack() as stack:
        opened = [stack.enter_context(texts_of(good, processes=pool)) for _ in range(9)]
        assert len({texts._process.pid for texts in opened} - {None}) == 1
        assert len(psutil.Process().children(recursive=True)) <= before + 2  # and the helper
        assert len({id(texts._table) for texts in opened}) == 1
        pid, table, ids = opened[0]._process.pid, opened[0]._table, encode(opened[0])
    eventually(lambda: has_ended(pid))
    with texts_of(good, processes=pool) as texts:  # what was found out is known again
        assert texts._table is table
        assert encode(texts) == ids


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation.json", '{"template": "<usr>{text}<sys>"}'),
        ("generation.json", '{"stop_tokens": ["<unused0>"]}'),
        ("chat_template.jinja", "{{ messages[0].content }}"),
        ("tokenizer_config.json", '{"chat_template": "가"}'),
    ],
)
def test_other_files_or_settings_are_another_process(
    good: Path, tmp_path: Path, pool: TextProcesses, file: str, content: str
) -> None:
    other = copy_of(good, tmp_path / "other", **{file: content})
    with texts_of(good, processes=pool) as one, texts_of(other, processes=pool) as two:
        assert len({one._process.pid, two._process.pid}) == 2


def test_models_of_one_process_have_their_texts(
    engine_: Engine, good: Path, tmp_path: Path
) -> None:
    other = make_talkative(tmp_path / "other", max_length=256, seed=4)
    (other / "generation.json").write_text('{"strip": [" "], "parameters": {"stop": ["다"]}}')
    for name, folder in (("a", good), ("b", other)):
        engine_.load(name, str(folder))
    alone = {name: ask(engine_, 99, name).wait() for name in "ab"}
    assert child(engine_, "a") == child(engine_, "b")
    together = [ask(engine_, 99, name) for name in "abab"]
    for name, request in zip("abab", together, strict=True):
        assert (request.wait().ids(), request.text()) == (alone[name].ids(), alone[name].text())
    assert alone["a"].text() != alone["b"].text()
    assert alone["b"].text() == alone["b"].text().strip(" ")
    pid = child(engine_, "b")
    engine_.unload("a")
    assert ask(engine_, 99, "b").wait().text() == alone["b"].text()
    assert child(engine_, "b") == pid
    engine_.unload("b")
    eventually(lambda: has_ended(pid))


def test_models_that_share_a_process_take_turns() -> None:
    turns, gate, done = Turns(), Gate(), threading.Event()
    ran: list[str] = []
    turns.soon("a", gate)  # type: ignore[arg-type]
    for user in "aaab":
        turns.soon(user, partial(ran.append, user))
    turns.soon("b", done.set)
    gate.open()
    assert done.wait(WAIT_S)
    turns.close()
    assert ran[:2] in (["a", "b"], ["b", "a"])


def test_a_process_is_started_again_from_the_files_of_the_model_that_needs_it(
    good: Path, tmp_path: Path, pool: TextProcesses
) -> None:
    """Other files are refused before they are parsed: others rely on what the process reads."""
    folder = copy_of(good, tmp_path / "changing")
    with texts_of(folder, processes=pool) as changed, texts_of(good, processes=pool) as other:
        ids = encode(other)
        (folder / "kogpt2.spiece").write_bytes(b"x")
        assert other._process.pid is not None
        os.kill(other._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"kogpt2\.spiece has changed since it was loaded"):
            encode(changed)
        assert encode(other) == ids


def test_of_a_start_that_fails_slowly_the_reason_is_reported(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout of a call does not begin before the process has started."""
    folder = copy_of(good, tmp_path / "바뀐 모델")
    with texts_of(folder) as texts:
        monkeypatch.setattr(engine.text.texts, "ENCODE_S", 0.0)  # any start takes longer
        (folder / "kogpt2.spiece").write_bytes(b"x")
        texts._process._kill("it is started again")
        with pytest.raises(ArtifactError, match=r"kogpt2\.spiece has changed since it was loaded"):
            encode(texts)


def test_processes_of_models_without_requests_end_where_there_are_many(
    good: Path, tmp_path: Path, pool: TextProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.text.process, "MAX_IDLE_PROCESSES", 2)
    with ExitStack() as stack:
        opened = []
        for i in range(5):
            template = f'{{"template": "{"가" * i} {{text}}"}}'
            folder = copy_of(good, tmp_path / str(i), **{"generation.json": template})
            opened.append(stack.enter_context(texts_of(folder, processes=pool)))
        eventually(lambda: sum(texts._process.pid is not None for texts in opened) <= 3)
        assert len({tuple(encode(texts)) for texts in opened}) == 5


def held(texts: Texts) -> tuple[Future[bool], Gate]:
    """A task that holds the texts' thread until the gate is opened."""
    gate = Gate()
    task = texts.soon(gate)
    gate.reached()
    return task, gate


def test_a_process_does_not_end_right_after_a_prompt_that_waited_for_it(good: Path) -> None:
    with texts_of(good) as texts:
        pid = texts._process.pid
        task, gate = held(texts)
        texts._process.end_when_idle()
        texts._process.turns.soon("another", lambda: texts._process.open(texts._source))
        texts._process.turns._tasks.move_to_end(None)  # its turn comes last
        gate.open()
        assert task.result(WAIT_S)
        texts.soon(lambda: None).result(WAIT_S)
        assert texts._process.pid == pid
        texts._process.end_when_idle()
        eventually(lambda: texts._process.pid is None)


def test_too_many_waiting_prompts_are_refused(good: Path) -> None:
    with texts_of(good, max_waiting=2) as texts:
        task, gate = held(texts)
        waiting = [texts.soon(lambda: texts.encode(PROMPT)) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 requests wait"):
            texts.soon(lambda: None)
        gate.open()
        assert task.result(WAIT_S)
        assert waiting[0].result(WAIT_S) == waiting[1].result(WAIT_S)


def test_a_process_that_gives_no_table_is_refused() -> None:
    table = Table(RUNS, ["가".encode(), b" a"], {0}).to_json()
    about = {"stop_ids": [1], "special_ids": [0], "table": table}
    found = About.from_json(about, "t", 2).table
    assert [found.piece(i) for i in range(3)] == ["가".encode(), b" a", b""]
    changes: list[dict[str, Any]] = [{"kind": "other"}, {"pieces": "!"}, {"pieces": ""}]
    changes += [{"lengths": lengths} for lengths in ([3, 1], [3, 4], ["3", 2])]
    changes += [{"lengths": [9, -4]}, {"lengths": []}, {"pieces": "", "lengths": []}]
    changes += [{"silent": ["a"]}, {"silent": [float("inf")]}, {"silent": [2]}, {"silent": [-1]}]
    changes += [{"byte_ids": None}, {"byte_ids": [2**70]}, {"lead": -1}, {"lead": 0.5}]
    for change in changes:
        with pytest.raises(ArtifactError, match="t cannot be used: its process gave no table"):
            About.from_json({**about, "table": table | change}, "t", 2)
    with pytest.raises(ArtifactError, match="gave no table"):  # masks would end beyond the logits
        About.from_json(about, "t", 1)


def test_end_tokens_that_a_table_lacks_are_left_out() -> None:
    """transformers writes GPT-2's 50256 for smaller vocabularies, too."""
    table = Table(RUNS, [b"<s>", b"</s>", "가".encode()], {0, 1}).to_json()
    value = {"stop_ids": [-1, 1, 3, 50256], "special_ids": [0], "table": table}
    about = About.from_json(value, "t", 3)
    assert about.stop_ids == {1}
    assert about.vocabulary.constrain(Form("choice", ("가",))).result(WAIT_S)[0].forced == 2
    about.vocabulary.end()


def test_the_time_to_first_token_is_from_the_receipt_to_the_sending(
    engine_: Engine, good: Path
) -> None:
    model, gate = engine_.load("m", str(good)), Gate()
    first_token_s = model.statistics.time_to_first_token_s
    counts: list[int] = []
    result = Result(on_token=lambda _: counts.append(sum(first_token_s._counts)))
    model.texts.soon(gate)
    gate.reached()
    parameters = engine_.parameters("m", {"max_new_tokens": 3})
    future = engine_.submit("m", PROMPT, parameters, result.emit)
    while_tokenized = time.monotonic()
    gate.open()
    [sequence] = future.result(WAIT_S)
    assert sequence.received_at <= while_tokenized <= sequence.queued_at
    result.wait()
    assert counts == [0, 1, 1]
    eventually(lambda: first_token_s.sum >= sequence.queued_at - while_tokenized)


# Faults cost one model


@pytest.mark.parametrize(
    "ids", [[-1], [], [5000], [2**70], [True], ["1"], [5] * 256, "가", {"1": 2}], ids=str
)
def test_ids_from_a_process_that_no_prompt_has_end_one_request(
    engine_: Engine, good: Path, monkeypatch: pytest.MonkeyPatch, ids: Any
) -> None:
    monkeypatch.setattr(engine.text.process.text_child, "serve", targets.hostile_tokenizer)
    engine_.load("m", str(good))
    with Pause(engine_):
        before = ask(engine_, 20)
        with pytest.raises(EngineError, match="ended: it gave"):
            Request(engine_, "m", {"ids": json.dumps(ids)})
    assert len(before.wait().ids()) == 20
    assert len(ask(engine_).wait().ids()) == 5


def test_a_tokenizer_that_stalls_holds_up_no_other_model(
    engine_: Engine, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_.load("good", str(good))
    engine_.load("m", str(make_hugging_face(tmp_path / "bad")))
    before, pid = ask(engine_).wait(), child(engine_)
    monkeypatch.setattr(engine.text.texts, "ENCODE_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        stalled = threads.submit(ask, engine_)
        others = 0
        while not stalled.done():
            assert len(ask(engine_, 5, "good").wait().ids()) == 5
            others += 1
        with pytest.raises(DeadlineExceeded, match="chat template ended: it took more than 1 s"):
            stalled.result()
    assert others > 0
    eventually(lambda: not psutil.pid_exists(pid))
    monkeypatch.undo()
    after = ask(engine_).wait()
    assert (after.ids(), after.text()) == (before.ids(), before.text())
    assert child(engine_) != pid


def test_a_panic_of_a_tokenizer_is_an_error_of_the_text(engine_: Engine, tmp_path: Path) -> None:
    def catastrophic(tokenizer: Tokenizer) -> None:
        """A tokenizer whose regex does not end on `a...a!`, and does on other texts."""
        splitter = pre_tokenizers.Split(Regex(r"^(a|aa)+$"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, tokenizer.pre_tokenizer])

    engine_.load("m", str(hugging_face(tmp_path / "bad", catastrophic)))
    before, pid = ask(engine_).wait(), child(engine_)
    with pytest.raises(InvalidRequest, match="retry-limit"):
        Request(engine_, "m", "a" * 60 + "!")
    assert ask(engine_).wait().ids() == before.ids()
    assert child(engine_) == pid


def test_a_model_has_answered_once_its_request_is_cancelled(engine_: Engine, good: Path) -> None:
    model = engine_.load("m", str(good))
    cancelled = ask(engine_, 240).begun()
    with Pause(engine_):  # no token of its own comes after it
        model.texts.soon(lambda: None).result(WAIT_S)
        assert not model.answered
        engine_.cancel(cancelled.sequences)
    eventually(lambda: model.answered)
    assert len(cancelled.tokens) < 240


class Ended:
    """A sequence with nothing to send."""

    over = True

    def take_tokens(self) -> list[Any]:
        return []


def test_an_answer_begins_while_the_step_loop_adds_another(
    engine_: Engine, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: Any = engine_.load("m", str(good)).texts
    other = ask(engine_, 240).begun()
    over = Sequence.over.fget
    assert over is not None

    def adding(sequence: Sequence) -> bool:
        if sequence in other.sequences:
            texts.write([Ended()])
        return over(sequence)

    monkeypatch.setattr(Sequence, "over", property(adding))
    assert ask(engine_, 4).wait().error is None
    monkeypatch.undo()


@pytest.mark.parametrize("kind", ["metaspace", DECODED])
def test_a_process_that_dies_costs_no_answer(engine_: Engine, tmp_path: Path, kind: str) -> None:
    engine_.load("m", str(make_hugging_face(tmp_path / "m", kind=kind, max_length=256)))
    whole = ask(engine_, 200, logit_bias=GO_ON).wait()
    idle = child(engine_)
    os.kill(idle, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(idle))
    killed = ask(engine_, 200, logit_bias=GO_ON).begun()
    os.kill(child(engine_), signal.SIGKILL)
    assert (killed.wait().ids(), killed.text()) == (whole.ids(), whole.text())
    assert killed.error is None


def test_tokens_become_text_without_their_process(
    engine_: Engine, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it stalls over a prompt, too."""
    monkeypatch.setattr(engine.text.texts, "ENCODE_S", WAIT_S)
    texts = engine_.load("m", str(good)).texts
    whole = ask(engine_, 200, logprobs=2).wait()
    with ThreadPoolExecutor(2) as threads:
        with Pause(engine_):
            request, pid = ask(engine_, 200, logprobs=2), child(engine_)
            os.kill(pid, signal.SIGSTOP)
            stalled = [threads.submit(ask, engine_) for _ in range(2)]
            eventually(lambda: texts._process.turns.waiting(texts) == 1)
        assert request.wait().text() == whole.text()
        assert [t.pieces for t in request.tokens] == [t.pieces for t in whole.tokens]
        assert not any(future.done() for future in stalled)
        os.kill(pid, signal.SIGCONT)
        for future in stalled:
            future.result(WAIT_S).wait()


def test_an_answer_that_stalls_fails_in_time(
    engine_: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_.load("m", str(make_hugging_face(tmp_path / "m", kind=DECODED, max_length=256)))
    request = ask(engine_, 240, logit_bias=GO_ON).begun()
    monkeypatch.setattr(engine.text.texts, "DECODE_S", 0.5)
    os.kill(child(engine_), signal.SIGSTOP)
    assert isinstance(request.wait().error, DeadlineExceeded)
    monkeypatch.undo()
    eventually(lambda: engine_.models()[0]["running"] == 0)  # its row is free
    assert ask(engine_).wait().error is None


def test_the_process_ends_with_its_model_and_with_a_load_that_fails(
    engine_: Engine, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose prompts are being tokenized fail with not found."""
    monkeypatch.setattr(engine.text.texts, "ENCODE_S", WAIT_S)
    texts = engine_.load("m", str(good)).texts
    pid = child(engine_)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        stalled = [threads.submit(ask, engine_) for _ in range(2)]
        eventually(lambda: texts._process.turns.waiting(texts) == 1)
        engine_.unload("m")
        for future in stalled:
            with pytest.raises(ModelNotFound):
                future.result(WAIT_S)
    eventually(lambda: not psutil.pid_exists(pid))
    children = psutil.Process().children(recursive=True)
    with pytest.raises(EngineError):
        engine_.load("m", str(good), "mxnet", "int4")
    eventually(lambda: len(psutil.Process().children(recursive=True)) <= len(children))


def test_a_stop_string_ends_an_answer_where_it_stands(engine_: Engine, good: Path) -> None:
    """It is found a step late, or later: the tokens behind it are not sent."""
    engine_.load("m", str(good))
    whole = ask(engine_, 200).wait()
    stop = whole.text()[len(whole.text()) // 3 :][:3]
    stopped = ask(engine_, 200, stop=[stop]).wait()
    first = next(i for i in range(200) if stop in "".join(t.text for t in whole.tokens[: i + 1]))
    assert stopped.ids() == whole.ids()[: first + 1]
    assert stopped.text() == whole.text()[: whole.text().find(stop)]
    assert stopped.finish_reason() == "stop"
    eventually(lambda: engine_.models()[0]["running"] == 0)
    assert engine_.models()[0]["tokens"] == 200 + first + 1
    assert engine_.budget.kv_bytes == 0


# Tokenizers that cannot be used are refused at the load


def prepended(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Prepend("가 " * 100_000)


def doubled(tokenizer: Tokenizer) -> None:
    twice = normalizers.Replace("a", "aa")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("l", "a")] + [twice] * 28)


def explosive_decoder(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", "x" * 30_000_000)])


@pytest.mark.parametrize("change", [prepended, doubled, explosive_decoder])
def test_a_tokenizer_that_takes_too_much_is_refused(
    tmp_path: Path, change: Callable[[Tokenizer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.text.process, "LOAD_S", 1.0)
    folder = hugging_face(tmp_path / "m", change)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"), texts_of(folder):
        pass


UNK = {"vocab": {"가": 0, "</s>": 1}, "unk_token": "<unk>"}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[없음]", "type_id": 0}}, SEQUENCE],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordLevel", **UNK}},
        {"model": {"type": "Unigram", "vocab": [["가", -1.0]], "unk_id": None}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        {"post_processor": TEMPLATE},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
    ],
    ids=str,
)
def test_a_tokenizer_that_panics_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = make_hugging_face(tmp_path / "m")
    path = folder / "tokenizer.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)
    reason = r"tokenizer\.json (is not a|cannot be used|.*crash)"
    with pytest.raises(ArtifactError, match=reason), texts_of(folder):
        pass
