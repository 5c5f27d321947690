"""Computes the probability of each text of a choice, such as the labels of a classifier."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from common.errors import InvalidRequest, OutOfMemory
from engine.backends.interface import BackendModel, Logits, Piece, Row
from engine.generation import MAX_SCORED_TOKENS, TextSequence
from engine.native.library import PAGE_TOKENS
from engine.sampling import TokenLogprobs, Weights, logprobs_of
from engine.sequence import Scheduled, State

# Most labels of a choice that a pass scores. Each has a row whose first page may be a copy, so
# sixteen rows take 20 MB with a model of KoGPT2's size. Larger: more memory, fewer passes.
MAX_LABEL_ROWS = 16


@dataclass(frozen=True)
class Way:
    """A way to write a text as tokens."""

    text: int  # index of the text in `Labels.texts`
    ids: list[int]
    ends: frozenset[int] = frozenset()  # one must follow `ids`, if another text begins with it

    @property
    def path(self) -> list[int]:
        """The tokens to compute behind the prompt to get the logits of the whole way."""
        return self.ids if self.ends else self.ids[:-1]


@dataclass(eq=False)
class Labels:
    """The texts of one request's choice and their probabilities.

    The model computes `paths`, each behind the prompt. No path is a prefix of another: ways with
    the same beginning share a path, and labels of one token need only the prompt's logits.
    """

    texts: tuple[str, ...]
    ways: list[Way]

    def __post_init__(self) -> None:
        each = sorted({tuple(way.path) for way in self.ways})
        self.paths = [
            list(path)
            for path, behind in zip(each, [*each[1:], ()], strict=True)
            if behind[: len(path)] != path or path == behind
        ]
        self.num_scored = 0  # paths
        self._by_way: dict[int, tuple[float, list[TokenLogprobs]]] = {}

    @property
    def complete(self) -> bool:
        return self.num_scored == len(self.paths)

    @property
    def longest(self) -> int:
        return max(len(way.ids) for way in self.ways)

    def score(self, logits: Logits, top: int) -> None:
        """Score the next path by its logits (1 + T, V), after the prompt and each of T tokens.

        top: how many of the likeliest tokens `tokens` returns at each position
        """
        path = self.paths[self.num_scored]
        self.num_scored += 1
        for i, way in enumerate(self.ways):
            if i not in self._by_way and path[: len(way.path)] == way.path:
                self._by_way[i] = _score(way, logits, top)

    @property
    def logprobs(self) -> list[tuple[str, float]]:
        """Pairs of text and log-probability relative to the other texts, likeliest first."""
        scores = self.scores
        scores -= np.logaddexp.reduce(scores)
        order = np.argsort(-scores, kind="stable")
        return [(self.texts[i], float(scores[i])) for i in order]

    @property
    def scores(self) -> Weights:
        """The log-probability (N,) of each text among everything that the model can generate."""
        scores = np.full(len(self.texts), -np.inf)
        for i, way in enumerate(self.ways):
            scores[way.text] = np.logaddexp(scores[way.text], self._by_way[i][0])
        return scores

    def tokens(self, text: int) -> list[tuple[int, TokenLogprobs]]:
        """Return the tokens of the likeliest way to write a text, with their log-probabilities."""
        ways = [i for i, way in enumerate(self.ways) if way.text == text]
        best = max(ways, key=lambda i: self._by_way[i][0])
        return list(zip(self.ways[best].ids, self._by_way[best][1], strict=True))


@dataclass(eq=False, kw_only=True)
class Choice(TextSequence):
    """An answer that is one of some texts, chosen as a whole by their probabilities."""

    labels: Labels

    @property
    def max_tokens(self) -> int:
        return min(len(self.prompt) + self.labels.longest, self.max_length)

    def row_lengths(self, model: BackendModel) -> list[int]:
        more = self.labels.paths[1 : _max_rows(model)]  # the first is on the sequence's own row
        return [self.max_tokens, *[PAGE_TOKENS + self.labels.longest] * len(more)]

    def next_parts(self, row: Row, most: int, model: BackendModel, alone: bool) -> list[Scheduled]:
        last = len(self.prompt) - 1  # the last token is computed with each label
        if row.length < last:
            return [self.part(row, min(row.length + most, last), 0)]
        parts: list[Scheduled] = []
        remaining = MAX_SCORED_TOKENS
        for path in self.labels.paths[self.labels.num_scored :][: _max_rows(model)]:
            remaining -= len(path) + 1
            if parts and remaining < 0:
                break
            try:
                target = model.open_row(row, row.length) if parts else row
            except (OutOfMemory, MemoryError):  # score fewer at once
                break
            piece = Piece(target, self.prompt[last:] + path, len(path) + 1, self.adapter)
            parts.append(Scheduled(self, piece, False))
        return parts

    def take(self, part: Scheduled, logits: Logits, model: BackendModel) -> bool:
        """Score a path of the labels by its logits (1 + T, V); the last completes the answer."""
        if not part.piece.num_logits:
            return False
        model.truncate(part.piece.row, len(self.prompt) - 1)
        self.labels.score(logits, self.parameters.logprobs or 0)
        if not self.labels.complete:
            return False
        text = self._sampler.pick(self.labels.scores)
        for token, logprobs in self.labels.tokens(text):
            if self.state is not State.FINISHED:
                last = self._append(token, None if self.parameters.logprobs is None else logprobs)
        self.finish()
        last.finish_reason = last.finish_reason or "complete"
        last.choices = self.labels.logprobs
        return True


def _max_rows(model: BackendModel) -> int:
    return MAX_LABEL_ROWS if model.caches_rows else 1


def _score(way: Way, logits: Logits, top: int) -> tuple[float, list[TokenLogprobs]]:
    """Return the log-probability of a whole way, and those of each of its tokens."""
    steps = [logprobs_of(row, i, top) for row, i in zip(logits, way.ids, strict=False)]
    logprob = sum(step.chosen for step in steps)
    if way.ends:
        ends = [logprobs_of(logits[len(way.ids)], end, 0).chosen for end in way.ends]
        logprob += float(np.logaddexp.reduce(ends))
    return logprob, steps


def labels_of(
    texts: tuple[str, ...], ways: Seq[Seq[list[int]]], stop_ids: frozenset[int]
) -> Labels:
    """Make labels from texts and, for each text, all its ways. Raises `InvalidRequest`."""
    all_ways = []
    for i, text in enumerate(texts):
        if not ways[i]:
            raise InvalidRequest(
                f"parameters.choice: this model's tokenizer has no tokens that write {text!r:.80}"
            )
        goes_on = any(other.startswith(text) and other != text for other in texts)
        ends = stop_ids if goes_on else frozenset[int]()
        all_ways += [Way(i, ids, ends) for n, ids in enumerate(ways[i]) if ids not in ways[i][:n]]
    return Labels(texts, all_ways)


def check_lengths(labels: Labels, prompt_tokens: int, max_length: int) -> None:
    """Raise `InvalidRequest` if a text does not fit into the context behind the prompt."""
    for way in labels.ways:
        if prompt_tokens + len(way.ids) > max_length:
            raise InvalidRequest(
                f"parameters.choice: {labels.texts[way.text]!r:.80} has {len(way.ids)} tokens, and"
                f" the prompt {prompt_tokens} of the {max_length} that the model's context has"
            )
