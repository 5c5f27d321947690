"""Computes the probability of each text of a choice, such as the labels of a classifier."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from common.errors import InvalidRequest
from engine.sampling import Logits, TokenLogprobs, Weights, logprobs_of


@dataclass(frozen=True)
class Way:
    """One sequence of tokens that writes a text.

    text: which one, by its place
    ends: ids of which one must follow, because another text goes on after the same tokens
    """

    text: int
    ids: list[int]
    ends: frozenset[int] = frozenset()


@dataclass(eq=False)
class Labels:
    """The texts of one request's choice, scored one way a pass; each pass begins anew at the last
    token of the prompt."""

    texts: tuple[str, ...]
    ways: list[Way]
    _found: list[tuple[float, list[TokenLogprobs]]] = field(default_factory=list)  # of each way

    @property
    def next_ids(self) -> list[int] | None:
        """Of the way that is to be scored; None once all are."""
        at = len(self._found)
        return self.ways[at].ids if at < len(self.ways) else None

    @property
    def longest(self) -> int:
        return max(len(way.ids) for way in self.ways)

    def score(self, logits: Logits, top: int) -> None:
        """Takes the logits (1 + T, V) before each token of the next way, and after its last; `top`
        likeliest tokens of each are kept."""
        way = self.ways[len(self._found)]
        steps = [logprobs_of(row, i, top) for row, i in zip(logits, way.ids, strict=False)]
        logprob = sum(step.chosen for step in steps)
        if way.ends:
            ends = [logprobs_of(logits[-1], end, 0).chosen for end in way.ends]
            logprob += float(np.logaddexp.reduce(ends))
        self._found.append((logprob, steps))

    @property
    def logprobs(self) -> list[tuple[str, float]]:
        """Each text with the log of its probability among the texts, the likeliest first."""
        scores = self.scores
        scores -= np.logaddexp.reduce(scores)
        order = np.argsort(-scores, kind="stable")
        return [(self.texts[i], float(scores[i])) for i in order]

    @property
    def scores(self) -> Weights:
        """The log-probability of each text (N,) among all that the model could write."""
        scores = np.full(len(self.texts), -np.inf)
        for way, (logprob, _) in zip(self.ways, self._found, strict=True):
            scores[way.text] = np.logaddexp(scores[way.text], logprob)
        return scores

    def tokens(self, text: int) -> list[tuple[int, TokenLogprobs]]:
        """Of the likeliest way to write one of the texts."""
        ways = [i for i, way in enumerate(self.ways) if way.text == text]
        best = max(ways, key=lambda i: self._found[i][0])
        return list(zip(self.ways[best].ids, self._found[best][1], strict=True))


def labels_of(
    texts: tuple[str, ...], ways: Seq[Seq[list[int]]], stop_ids: frozenset[int]
) -> Labels:
    """`ways`: of each text, the sequences of tokens that write it."""
    found = []
    for i, text in enumerate(texts):
        goes_on = any(other.startswith(text) and other != text for other in texts)
        ends = stop_ids if goes_on else frozenset[int]()
        found += [Way(i, ids, ends) for n, ids in enumerate(ways[i]) if ids not in ways[i][:n]]
    return Labels(texts, found)


def check_labels(labels: Labels, prompt_tokens: int, max_length: int) -> None:
    """Raises `InvalidRequest` where a text has no tokens or does not fit behind the prompt."""
    for way in labels.ways:
        text = labels.texts[way.text]
        if not way.ids:
            raise InvalidRequest(
                f"parameters.choice: this model's tokenizer makes no tokens of {text!r:.80}"
            )
        if prompt_tokens + len(way.ids) > max_length:
            raise InvalidRequest(
                f"parameters.choice: {text!r:.80} has {len(way.ids)} tokens, and the prompt"
                f" {prompt_tokens} of the {max_length} that the model's context has"
            )
