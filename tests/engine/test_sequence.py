"""An answer is streamed piece by piece, and nothing of a stop string ever gets out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from common.errors import DeadlineExceeded, EngineError
from common.parameters import Parameters
from engine.sequence import TOKENS_AT_ONCE, Sequence, State, Token
from engine.text.answer_text import AnswerText
from engine.text.table import SEPARATE, SeparateDetokenizer, Table

EOS = 0


class Story:
    """A sequence that is led through the given pieces."""

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
        self.sequence = Sequence(
            prompt=[1],
            parameters=Parameters(**options),
            max_length=max_length,
            stop_ids=frozenset() if eos_id is None else frozenset({eos_id}),
            emit=self.emitted.append,
        )
        detokenizer = SeparateDetokenizer(Table(SEPARATE, bytes_, {EOS}, byte_ids))
        p = self.sequence.parameters
        self.text = AnswerText(detokenizer, p.stop, (), p.min_new_tokens)
        self.size = len(vocabulary)
        for piece in pieces:
            if self.sequence.over:
                break
            self.advance(vocabulary.index(piece))

    def advance(self, token: int) -> None:
        logits = np.zeros(self.size, dtype=np.float32)
        logits[token] = 1
        self.sequence.advance(logits)
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

    @property
    def finish_reason(self) -> str | None:
        return self.tokens[-1].finish_reason


def test_each_token_is_emitted_with_its_text() -> None:
    story = Story("▁안녕", "하세요", "▁여러분")
    assert story.texts == [" 안녕", "하세요", " 여러분"]
    assert [token.id for token in story.tokens] == story.sequence.ids[1:] == [1, 2, 3]
    assert story.finish_reason is None


def test_the_end_token_stops_an_answer_and_is_no_text() -> None:
    story = Story("▁물", "</s>", "▁더")
    assert story.texts == [" 물", ""]
    assert story.finish_reason == "stop"
    assert story.sequence.state is State.FINISHED


def test_an_end_token_that_is_ignored_is_no_text_and_no_end() -> None:
    story = Story("▁물", "</s>", "▁더", ignore_eos=True, max_new_tokens=3)
    assert story.texts == [" 물", "", " 더"]
    assert story.finish_reason == "length"


def test_without_an_end_token_nothing_stops_an_answer_but_its_length() -> None:
    assert Story("a", "</s>", "b", eos_id=None).texts == ["a", "", "b"]


def test_an_answer_ends_after_the_tokens_that_were_asked_for() -> None:
    story = Story("a", "b", "c", "d", max_new_tokens=3)
    assert story.texts == ["a", "b", "c"]
    assert [token.finish_reason for token in story.tokens] == [None, None, "length"]


def test_an_answer_ends_where_the_context_is_full() -> None:
    story = Story("a", "b", "c", "d", max_length=4)
    assert len(story.sequence.ids) == 4
    assert story.finish_reason == "length"


def test_the_end_token_in_the_last_place_is_a_stop() -> None:
    assert Story("a", "</s>", max_new_tokens=2).finish_reason == "stop"


def test_a_stop_string_within_a_token_cuts_it() -> None:
    story = Story("안녕", "그래\n그리고", "x", stop=("\n",))
    assert story.texts == ["안녕", "그래"]
    assert story.finish_reason == "stop"


def test_a_stop_string_over_several_tokens_never_gets_out() -> None:
    story = Story("아", "<", "끝", ">", "x", stop=("<끝>",))
    assert story.texts == ["아", "", "", ""]
    assert story.finish_reason == "stop"


def test_a_stop_string_among_the_first_tokens_is_text_where_more_are_wanted() -> None:
    pieces = ("아", "끝", "이", "끝", "x")
    assert Story(*pieces, stop=("끝",)).texts == ["아", ""]
    story = Story(*pieces, stop=("끝",), min_new_tokens=3)
    assert story.texts == ["아", "끝", "이", ""]
    assert story.finish_reason == "stop"
    assert Story(*pieces, stop=("끝",), min_new_tokens=4, max_new_tokens=5).texts == list(pieces)


def test_a_stop_string_that_ends_behind_the_wanted_tokens_never_gets_out() -> None:
    story = Story("ab", "<", "끝", ">", "x", stop=("<끝>", "<"), min_new_tokens=3)
    assert story.texts == ["ab", "", "", ""]
    assert story.finish_reason == "stop"


def test_text_that_only_looked_like_a_stop_string_gets_out_later() -> None:
    story = Story("아", "<", "끝", "!", stop=("<끝>",))
    assert story.texts == ["아", "", "", "<끝!"]


def test_only_what_can_still_become_a_stop_string_is_held_back() -> None:
    story = Story("12ab", "ab", "c", stop=("ababc",))
    assert story.texts == ["12", "", ""]
    assert Story("xaa", "aab", stop=("aab",)).texts == ["x", "aa"]


def test_the_first_of_several_stop_strings_wins() -> None:
    assert Story("가나다라", stop=("다", "나")).texts == ["가"]
    assert Story("가", "나다", "라", stop=("나다라", "다")).texts == ["가", "나"]


def test_a_stop_string_in_the_first_token_leaves_no_text() -> None:
    story = Story("끝이다", stop=("끝",))
    assert story.texts == [""]
    assert story.finish_reason == "stop"


def test_the_end_token_lets_held_text_out() -> None:
    assert Story("가<", "</s>", stop=("<끝>",)).texts == ["가", "<"]


def test_the_last_token_lets_held_text_out() -> None:
    story = Story("가<", "끝", max_new_tokens=2, stop=("<끝>",))
    assert story.texts == ["가", "<끝"]
    assert story.finish_reason == "length"


def test_a_stop_string_in_the_last_place_is_a_stop() -> None:
    assert Story("가", "끝", max_new_tokens=2, stop=("끝",)).finish_reason == "stop"


def test_a_space_of_the_tokenizer_is_a_space_in_a_stop_string() -> None:
    assert Story("그", "▁끝", stop=(" 끝",)).texts == ["그", ""]


def test_characters_in_bytes_come_when_they_are_whole() -> None:
    story = Story("a", "<0xEA>", "<0xB0>", "<0x80>", stop=("나",))
    assert story.texts == ["a", "", "", "가"]


def test_a_stop_string_is_found_in_characters_made_of_bytes() -> None:
    story = Story("a", "<0xEA>", "<0xB0>", "<0x80>", stop=("가",))
    assert story.texts == ["a", "", "", ""]
    assert story.finish_reason == "stop"


def test_a_character_cut_short_at_the_end_is_one_replacement_character() -> None:
    assert Story("a", "<0xEA>", max_new_tokens=2).texts == ["a", "\ufffd"]
    assert Story("a", "<0xEA>", "</s>").texts == ["a", "", "\ufffd"]


def test_random_text_is_cut_where_the_whole_text_would_be() -> None:
    rng = np.random.default_rng(3)
    stopped = 0
    for _ in range(400):
        letters = ["가", "나", "나가", "가가나", "다"]
        pieces = [letters[i] for i in rng.integers(0, len(letters), 12)]
        stops = tuple(
            "".join(["가", "나", "다"][i] for i in rng.integers(0, 3, rng.integers(1, 5)))
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
        assert story.finish_reason == ("stop" if ends else "length")
        for text in itertools.accumulate(story.texts):
            assert expected.startswith(text)
            assert not any(stop in text for stop in stops)
        stopped += bool(ends)
    assert 100 < stopped < 400


def test_log_probabilities_come_with_each_token() -> None:
    story = Story("a", "b", "</s>", logprobs=2)
    assert all(token.logprobs is not None for token in story.tokens)


def test_an_error_ends_a_sequence() -> None:
    story = Story("a")
    error = DeadlineExceeded("too late")
    story.sequence.fail(error)
    assert story.emitted[-1] is error
    assert story.sequence.state is State.FINISHED


def test_nothing_is_told_behind_an_end() -> None:
    story = Story("a", "끝", stop=("끝",))
    story.advance(1)
    story.sequence.fail(DeadlineExceeded("too late"))
    assert [token.finish_reason for token in story.tokens] == [None, "stop"]
    assert len(story.emitted) == 2


def test_an_answer_that_nobody_reads_meanwhile_is_told_in_few_pieces() -> None:
    sequence = Sequence([1], Parameters(max_new_tokens=20), 100, frozenset(), print, eager=False)
    logits = np.eye(4, dtype=np.float32)[2]
    counts = [len(sequence.take_tokens()) for _ in range(20) if sequence.advance(logits)]
    assert counts == [1, TOKENS_AT_ONCE, TOKENS_AT_ONCE, 20 - 1 - 2 * TOKENS_AT_ONCE]


@pytest.mark.parametrize(("asked", "most"), [(5, 6), (98, 99), (99, 100), (1000, 100)])
def test_the_most_tokens_of_a_sequence_are_bounded_by_the_context(asked: int, most: int) -> None:
    assert Story(max_new_tokens=asked).sequence.max_tokens == most
