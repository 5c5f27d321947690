"""An answer is streamed piece by piece, and nothing of a stop string is sent."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from common.errors import DeadlineExceeded, EngineError
from common.parameters import Parameters
from engine.generation import TOKENS_AT_ONCE, Generation, Token
from engine.sequence import State
from engine.text.answer_text import AnswerText
from engine.text.table import SEPARATE, SeparateDetokenizer, Table

EOS = 0


class Story:
    """A sequence whose logits choose the given pieces."""

    def __init__(
        self, *pieces: str, max_length: int = 100, eos_id: int | None = EOS, **options: Any
    ) -> None:
        vocabulary = ["</s>", *dict.fromkeys(pieces)]
        byte_ids = {i for i, piece in enumerate(vocabulary) if piece[:3] == "<0x"}
        bytes_ = [
            bytes([int(piece[3:-1], 16)]) if i in byte_ids else piece.replace("▁", " ").encode()
            for i, piece in enumerate(vocabulary)
        ]
        self.emitted: list[Token | EngineError] = []
        p = Parameters(**options)
        stop_ids = frozenset[int]() if eos_id is None else frozenset({eos_id})
        self.sequence = Generation(
            prompt=[1],
            parameters=p,
            max_length=max_length,
            stop_ids=stop_ids,
            emit=self.emitted.append,
        )
        detokenizer = SeparateDetokenizer(Table(SEPARATE, bytes_, {EOS}, byte_ids))
        self.text = AnswerText(detokenizer, p.stop, (), p.min_new_tokens)
        self.size = len(vocabulary)
        for piece in pieces:
            if not self.sequence.over:
                self.advance(vocabulary.index(piece))

    def advance(self, token: int) -> None:
        self.sequence.advance(np.eye(self.size, dtype=np.float32)[token])
        for made in self.sequence.take_tokens():
            made.text, stopped = self.text.write(made.id, made.finish_reason)
            if stopped:
                made.finish_reason = "stop"
            self.sequence.send(made)

    @property
    def tokens(self) -> list[Token]:
        return [item for item in self.emitted if isinstance(item, Token)]

    @property
    def texts(self) -> list[str]:
        return [token.text for token in self.tokens]


# Of each answer: its pieces, the options, the texts that are sent, and the finish reason.
ANSWERS: list[tuple[str, dict[str, Any], list[str], str | None]] = [
    ("▁안녕 하세요 ▁여러분", {}, [" 안녕", "하세요", " 여러분"], None),
    # The end token
    ("▁물 </s> ▁더", {}, [" 물", ""], "stop"),
    ("▁물 </s> ▁더", {"ignore_eos": True, "max_new_tokens": 3}, [" 물", "", " 더"], "length"),
    ("a </s> b", {"eos_id": None}, ["a", "", "b"], None),
    ("a </s>", {"max_new_tokens": 2}, ["a", ""], "stop"),
    # The length and the context
    ("a b c d", {"max_new_tokens": 3}, ["a", "b", "c"], "length"),
    ("a b c d", {"max_length": 4}, ["a", "b", "c"], "length"),
    # Stop strings: within a token, of several, of the first and the last one
    ("안녕 그래\n그리고 x", {"stop": ("\n",)}, ["안녕", "그래"], "stop"),
    ("아 < 끝 > x", {"stop": ("<끝>",)}, ["아", "", "", ""], "stop"),
    ("끝이다", {"stop": ("끝",)}, [""], "stop"),
    ("가 끝", {"max_new_tokens": 2, "stop": ("끝",)}, ["가", ""], "stop"),
    ("그 ▁끝", {"stop": (" 끝",)}, ["그", ""], "stop"),
    # Not among the first tokens
    ("아 끝 이 끝 x", {"stop": ("끝",), "min_new_tokens": 3}, ["아", "끝", "이", ""], "stop"),
    (
        "아 끝 이 끝 x",
        {"stop": ("끝",), "min_new_tokens": 4, "max_new_tokens": 5},
        ["아", "끝", "이", "끝", "x"],
        "length",
    ),
    ("ab < 끝 > x", {"stop": ("<끝>", "<"), "min_new_tokens": 3}, ["ab", "", "", ""], "stop"),
    # Text that may begin a stop string is held back
    ("아 < 끝 !", {"stop": ("<끝>",)}, ["아", "", "", "<끝!"], None),
    ("12ab ab c", {"stop": ("ababc",)}, ["12", "", ""], "stop"),
    ("xaa aab", {"stop": ("aab",)}, ["x", "aa"], "stop"),
    ("가< </s>", {"stop": ("<끝>",)}, ["가", "<"], "stop"),
    ("가< 끝", {"max_new_tokens": 2, "stop": ("<끝>",)}, ["가", "<끝"], "length"),
    # The first of several
    ("가나다라", {"stop": ("다", "나")}, ["가"], "stop"),
    ("가 나다 라", {"stop": ("나다라", "다")}, ["가", "나"], "stop"),
    # Characters of several tokens
    ("a <0xEA> <0xB0> <0x80>", {"stop": ("나",)}, ["a", "", "", "가"], None),
    ("a <0xEA> <0xB0> <0x80>", {"stop": ("가",)}, ["a", "", "", ""], "stop"),
    ("a <0xEA>", {"max_new_tokens": 2}, ["a", "\ufffd"], "length"),
    ("a <0xEA> </s>", {}, ["a", "", "\ufffd"], "stop"),
]


@pytest.mark.parametrize(("pieces", "options", "texts", "reason"), ANSWERS)
def test_an_answers_texts_and_how_it_ends(
    pieces: str, options: dict[str, Any], texts: list[str], reason: str | None
) -> None:
    story = Story(*pieces.split(" "), **options)
    assert story.texts == texts
    assert [token.finish_reason for token in story.tokens] == [None] * (len(texts) - 1) + [reason]
    assert [token.id for token in story.tokens] == story.sequence.ids[1:]
    assert story.sequence.over == (reason is not None)


def test_random_text_is_cut_where_the_whole_text_would_be() -> None:
    rng = np.random.default_rng(3)
    stopped = 0
    for _ in range(400):
        pieces = rng.choice(["가", "나", "나가", "가가나", "다"], 12).tolist()
        stops = tuple(
            "".join(rng.choice(["가", "나", "다"], rng.integers(1, 5)))
            for _ in range(rng.integers(1, 4))
        )
        whole = "".join(pieces)
        # The answer ends with the first token that completes any stop string.
        ends = [
            at
            for text in itertools.accumulate(pieces)
            for at in [min((text.find(s) for s in stops if s in text), default=-1)]
            if at >= 0
        ]
        expected = whole[: ends[0]] if ends else whole
        story = Story(*pieces, stop=stops, max_new_tokens=12)
        assert "".join(story.texts) == expected
        assert story.tokens[-1].finish_reason == ("stop" if ends else "length")
        for text in itertools.accumulate(story.texts):
            assert expected.startswith(text)
            assert not any(stop in text for stop in stops)
        stopped += bool(ends)
    assert 100 < stopped < 400


def test_an_error_ends_a_sequence_and_nothing_is_sent_after_an_end() -> None:
    failed, stopped, error = Story("a"), Story("a", "끝", stop=("끝",)), DeadlineExceeded("late")
    failed.sequence.fail(error)
    assert failed.emitted[-1] is error
    assert failed.sequence.state is State.FINISHED
    stopped.advance(1)
    stopped.sequence.fail(error)
    assert [token.finish_reason for token in stopped.tokens] == [None, "stop"]
    assert len(stopped.emitted) == 2


def test_a_client_that_cannot_be_reached_ends_its_answer() -> None:
    """Nothing is raised on the engine's threads; if the client can take an error, it gets one."""
    story, refused = Story(), list[Any]()

    def fail_once(item: Token | EngineError) -> None:
        refused.append(item)
        if len(refused) == 1:
            raise RuntimeError("a fault in the middle of a step")

    story.sequence.emit = fail_once
    story.advance(0)
    assert [type(item) for item in refused] == [Token, EngineError]
    assert (refused[1].status, "fault" in refused[1].message) == (500, False)
    assert story.sequence.over
    closed = Story()
    closed.sequence.emit = lambda item: 1 / 0
    closed.sequence.fail(DeadlineExceeded("late"))
    assert closed.sequence.over


def test_tokens_of_an_answer_that_is_not_streamed_are_sent_several_at_once() -> None:
    sequence = Generation(
        prompt=[1],
        parameters=Parameters(max_new_tokens=20),
        max_length=100,
        stop_ids=frozenset(),
        emit=print,
        eager=False,
    )
    logits = np.eye(4, dtype=np.float32)[2]
    counts = [len(sequence.take_tokens()) for _ in range(20) if sequence.advance(logits)]
    assert counts == [1, TOKENS_AT_ONCE, TOKENS_AT_ONCE, 20 - 1 - 2 * TOKENS_AT_ONCE]


@pytest.mark.parametrize(("new", "most"), [(5, 6), (98, 99), (99, 100), (1000, 100)])
def test_the_most_tokens_of_a_sequence_are_bounded_by_the_context(new: int, most: int) -> None:
    assert Story(max_new_tokens=new).sequence.max_tokens == most
