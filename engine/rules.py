"""Rules that ban tokens or make them less likely, depending on the tokens before them.

A rule is called once a step, on the step loop's thread, with the logits (V,) of a row, which it
changes in place, and all ids of prompt and answer, which only grow from call to call. A rule that
has not been called yet can be copied for another answer to the same prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from common.parameters import Parameters
from engine.text.phrases import Phrases

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Rule = Callable[[Logits, Ids], None]

# The logit of a banned token: weight 0 at any temperature, and sums with it stay finite.
FORBIDDEN = np.float32(-1e30)


def rules_of(
    parameters: Parameters,
    prompt: Seq[int],
    stop_ids: Iterable[int],
    phrases: Callable[[tuple[str, ...]], Phrases],
) -> list[Rule]:
    """Return the rules that a request's parameters set, penalties before bans.

    Work that is too slow for a step, such as an index of the prompt, is done here. `phrases` makes
    an index of texts in the tokens of the vocabulary.
    """
    p, rules = parameters, list[Rule]()
    if p.dry_multiplier and p.dry_penalty_last_n:
        rules.append(Dry(p, prompt, phrases(p.dry_sequence_breakers)))
    if p.no_repeat_ngram_size:
        rules.append(NoRepeatNgrams(p.no_repeat_ngram_size))
    if p.bad_words_ids:
        rules.append(BadWordsIds(p.bad_words_ids, stop_ids))
    if p.bad_words:
        rules.append(BadWords(phrases(p.bad_words), prompt))
    if p.min_new_tokens and not p.ignore_eos:
        rules.append(MinNewTokens(stop_ids, len(prompt) + p.min_new_tokens))
    return rules


class MinNewTokens:
    """Bans end tokens below `length` ids, as transformers' MinNewTokensLengthLogitsProcessor."""

    def __init__(self, stop_ids: Iterable[int], length: int) -> None:
        self._ends = np.array(sorted(stop_ids), np.int64)
        self._length = length

    def __call__(self, logits: Logits, ids: Ids) -> None:
        if len(ids) < self._length:  # end tokens may be beyond the vocabulary
            logits[self._ends[(self._ends >= 0) & (self._ends < len(logits))]] = FORBIDDEN


class NoRepeatNgrams:
    """Bans repeated n-grams of `size` tokens, as transformers' NoRepeatNGramLogitsProcessor."""

    def __init__(self, size: int) -> None:
        self._before = size - 1

    def __call__(self, logits: Logits, ids: Ids) -> None:
        size, count = self._before, len(ids) - self._before
        if count <= 0:
            return
        ends = np.arange(count)
        if size:  # only windows that end in the last token are compared
            ends = np.flatnonzero(ids[size - 1 : -1] == ids[-1])
            windows = np.lib.stride_tricks.sliding_window_view(ids, size)
            ends = ends[(windows[ends] == ids[-size:]).all(axis=1)]
        logits[ids[size:][ends]] = FORBIDDEN


class BadWordsIds:
    """Bans lists of ids, except lone end tokens, as transformers' NoBadWordsLogitsProcessor."""

    def __init__(self, lists: Iterable[tuple[int, ...]], stop_ids: Iterable[int]) -> None:
        ends = {(i,) for i in stop_ids}
        banned: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for *before, last in set(lists) - ends:
            banned[tuple(before)].append(last)
        self._last = {before: np.array(last) for before, last in banned.items()}
        self._sizes = set(map(len, banned))

    def __call__(self, logits: Logits, ids: Ids) -> None:
        for size in self._sizes:
            if size <= len(ids):
                last = self._last.get(tuple(ids[len(ids) - size :].tolist()))
                if last is not None:
                    logits[last] = FORBIDDEN


class BadWords:
    """Bans tokens that would complete a banned text, which may begin in the prompt."""

    def __init__(self, words: Phrases, prompt: Seq[int]) -> None:
        self._words, self._tail = words, b""
        self._read = max(len(prompt) - words.longest, 0)  # ids read; no text has more tokens
        self._append(np.array(prompt, np.int64))

    def _append(self, ids: Ids) -> None:
        for token in ids[self._read :].tolist():
            self._tail, _ = self._words.read(self._tail, token)
        self._read = len(ids)

    def __call__(self, logits: Logits, ids: Ids) -> None:
        self._append(ids)
        for tokens in self._words.completing(self._tail):
            logits[tokens] = FORBIDDEN


class Dry:
    """Penalizes tokens that would continue a repetition, more for longer repetitions.

    Where the last n tokens occurred before, followed by t, the logit of t is lowered by multiplier
    * base ** (n - allowed_length), for the longest such n if it is at least allowed_length. A
    repetition does not extend over a breaker, and no token that contains one is penalized.

    "DRY: A modern repetition penalty",
    https://github.com/oobabooga/text-generation-webui/pull/5677, in the form that llama.cpp gave
    it, https://github.com/ggml-org/llama.cpp/pull/9702.
    """

    def __init__(self, parameters: Parameters, prompt: Seq[int], breakers: Phrases) -> None:
        self._p, self._breakers = parameters, breakers
        self._tail, self._unbroken = b"", 0  # last bytes, and tokens since a breaker
        # For each j below the number of ids: the length of the common suffix of ids[:j] and ids.
        self._lengths = np.zeros(0, np.int64)
        self._append(np.array(prompt, np.int64))

    def _append(self, ids: Ids) -> None:
        for at in range(len(self._lengths), len(ids)):
            token = int(ids[at])
            lengths = np.zeros(at + 1, np.int64)
            np.multiply(self._lengths + 1, ids[:at] == token, out=lengths[1:])
            self._lengths = lengths
            self._tail, broken = self._breakers.read(self._tail, token)
            self._unbroken = 0 if broken else self._unbroken + 1

    def __call__(self, logits: Logits, ids: Ids) -> None:
        self._append(ids)
        p = self._p
        begin = 0 if p.dry_penalty_last_n < 0 else max(len(ids) - p.dry_penalty_last_n, 0)
        lengths = np.minimum(self._lengths[begin:], np.arange(len(ids) - begin))
        lengths = np.minimum(lengths, self._unbroken)[1:]
        repeats = np.flatnonzero(lengths >= p.dry_allowed_length)
        if not len(repeats):
            return
        repeats = repeats[np.argsort(lengths[repeats], kind="stable")]  # longest last
        with np.errstate(over="ignore"):
            penalties = p.dry_multiplier * p.dry_base ** (lengths[repeats] - p.dry_allowed_length)
        tokens = ids[begin + 1 :][repeats]
        exempt = logits[self._breakers.within]
        logits[tokens] -= np.minimum(penalties, -FORBIDDEN).astype(np.float32)
        logits[self._breakers.within] = exempt
