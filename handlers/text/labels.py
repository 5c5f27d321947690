"""Labels of a classifier's logits, as transformers' pipelines write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FUNCTIONS = ("softmax", "sigmoid", "none")
OUTSIDE = "O"  # the label of tokens that are no entity


@dataclass(frozen=True)
class Options:
    """The parameters of a request.

    top_k: the number of labels of each text; None: all
    listed: whether each text's labels are a list
    function: makes scores of logits; None: the model's own does
    grouped: whether neighboring tokens of one kind are one entity, as with transformers'
        aggregation_strategy "simple". Tokens that share a character, such as the bytes of a
        syllable, then have one label, that of the mean of their scores.
    ignored: the labels of tokens that are no entity
    """

    truncate: bool = False
    top_k: int | None = 1
    listed: bool = False
    function: str | None = None
    grouped: bool = False
    ignored: tuple[str, ...] = (OUTSIDE,)


def scores(logits: Sequence[float], function: str) -> list[float]:
    """Return the score of each label, by one of `FUNCTIONS`."""
    if function == "none":
        return list(logits)
    if function == "sigmoid":
        return [_sigmoid(x) for x in logits]
    largest = max(logits)
    weights = [math.exp(x - largest) for x in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def ranked(
    logits: Sequence[float], labels: Sequence[str], function: str
) -> list[tuple[str, float]]:
    """Return all labels of a text with their scores, the best first."""
    pairs = zip(labels, scores(logits, function), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])


@dataclass(frozen=True)
class _Token:
    """A token, or tokens that share a character; `scores` are their means."""

    begin: int
    end: int
    index: int
    scores: list[float]
    label: str

    @property
    def score(self) -> float:
        return max(self.scores)


def entities(
    text: str, result: Mapping[str, Any], labels: Sequence[str], options: Options
) -> list[dict[str, Any]]:
    """Return the labeled parts of a text; `start` and `end` count its characters.

    result: the engine's, with the logits and places of all tokens
    """
    tokens = _tokens(result, labels)
    if not options.grouped:
        return [
            {"entity": t.label, "score": t.score, "index": t.index, **_place(text, t.begin, t.end)}
            for t in tokens
            if t.label not in options.ignored
        ]
    groups: list[list[_Token]] = []
    for token in _whole_characters(tokens, labels):
        begins, kind = _kind(token.label)
        if groups and not begins and _kind(groups[-1][-1].label)[1] == kind:
            groups[-1].append(token)
        else:
            groups.append([token])
    made = []
    for group in groups:
        kind = group[0].label.split("-", 1)[-1]
        if kind not in options.ignored:
            score = sum(token.score for token in group) / len(group)
            place = _place(text, group[0].begin, group[-1].end)
            made.append({"entity_group": kind, "score": score, **place})
    return made


def _tokens(result: Mapping[str, Any], labels: Sequence[str]) -> list[_Token]:
    """Return a text's tokens without those that the tokenizer added to it."""
    columns = (result[name] for name in ("logits", "begins", "ends", "special"))
    tokens = []
    for index, (logits, begin, end, special) in enumerate(zip(*columns, strict=True)):
        if not special:
            tokens.append(_labeled(begin, end, index, scores(logits, "softmax"), labels))
    return tokens


def _labeled(
    begin: int, end: int, index: int, scores: list[float], labels: Sequence[str]
) -> _Token:
    return _Token(begin, end, index, scores, labels[scores.index(max(scores))])


def _whole_characters(tokens: Sequence[_Token], labels: Sequence[str]) -> list[_Token]:
    """Join tokens that share characters."""
    whole: list[list[_Token]] = []
    for token in tokens:
        if whole and token.begin < max(other.end for other in whole[-1]):
            whole[-1].append(token)
        else:
            whole.append([token])
    return [
        group[0]
        if len(group) == 1
        else _labeled(
            group[0].begin,
            max(token.end for token in group),
            group[0].index,
            [sum(column) / len(group) for column in zip(*(t.scores for t in group), strict=True)],
            labels,
        )
        for group in whole
    ]


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, B-PER, and its kind, PER."""
    if label.startswith(("B-", "I-")):
        return label.startswith("B-"), label[2:]
    return False, label


def _place(text: str, begin: int, end: int) -> dict[str, Any]:
    return {"word": text[begin:end].strip(), "start": begin, "end": end}
