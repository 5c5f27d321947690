"""Choosing the next token of one row from its logits (V,), in numpy.

For a vocabulary of 50,000 a full sort costs milliseconds, so nothing here sorts it: where few
tokens can be drawn they are found by partition, and only those are sorted; where there may be
many, as on a flat distribution, `Ranking` finds a place among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from common.parameters import Parameters

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]

FEW = 256  # tokens that are found and sorted
BINS = 4096
# Smaller temperatures and penalties do what these do; float32 overflows on the way.
SMALLEST = 1e-6


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a step, before temperature and truncation: of the chosen token, and of
    the likeliest, best first."""

    chosen: float
    top: list[tuple[int, float]]


class Sampler:
    """Draws the tokens of one sequence. The same parameters and logits give the same tokens."""

    def __init__(self, parameters: Parameters, index: int = 0) -> None:
        self._p = parameters
        self._temperature = max(parameters.temperature, SMALLEST)
        self._penalty = max(parameters.repetition_penalty, SMALLEST)
        self._counts: Counter[int] | None = None  # of the answer's tokens
        if parameters.frequency_penalty or parameters.presence_penalty:
            self._counts = Counter()
        self._biased = np.array([token for token, _ in parameters.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in parameters.logit_bias], np.float32)
        seed = None if parameters.seed is None else parameters.seed + index
        self._random = np.random.Generator(np.random.PCG64(seed)) if parameters.do_sample else None

    def choose(self, logits: Logits, ids: Seq[int]) -> tuple[int, TokenLogprobs | None]:
        """The next token after `ids`, with log-probabilities where they were asked for."""
        p = self._p
        raw = logits
        if p.repetition_penalty != 1.0:
            logits = _penalize(logits, ids, self._penalty)
        if self._counts or self._biased.size:
            logits = self._shifted(logits)
        token = int(logits.argmax()) if self._random is None else self._draw(logits)
        if self._counts is not None:
            self._counts[token] += 1
        return token, None if p.logprobs is None else logprobs_of(raw, token, p.logprobs)

    def _shifted(self, logits: Logits) -> Logits:
        logits = logits.copy()
        logits[self._biased] += self._biases
        if self._counts:
            tokens = np.fromiter(self._counts.keys(), np.int64)
            counts = np.fromiter(self._counts.values(), np.float32)
            logits[tokens] -= self._p.frequency_penalty * counts + self._p.presence_penalty
        return logits

    def _draw(self, logits: Logits) -> int:
        p = self._p
        assert self._random is not None
        uniform = self._random.random()  # one number per token, whatever is cut off below
        size = logits.shape[0]
        top_k = p.top_k if 0 < p.top_k < size else size
        if top_k == size and p.top_p == 1.0:
            return _at(np.cumsum(_weights(logits, self._temperature)), uniform)
        if top_k > FEW:
            ranking = Ranking(logits, _weights(logits, self._temperature))
            return ranking.draw(top_k, p.top_p, uniform)
        candidates = top_indices(logits, top_k)
        weights = _weights(logits[candidates], self._temperature)
        # Candidates come best first: keep those before which less than top_p has gathered.
        before = np.cumsum(weights) - weights
        return int(
            candidates[_at(np.cumsum(weights[~(before >= p.top_p * weights.sum())]), uniform)]
        )


def _weights(logits: Logits, temperature: float) -> Weights:
    """In proportion to the probabilities; the likeliest has 1."""
    weights: Weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return weights


def _at(cumulative: Weights, uniform: float) -> int:
    at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(at, len(cumulative) - 1)


class Ranking:
    """All tokens, best first, equal ones in index order, without sorting them: in bins of like
    logits, of which one is looked into. Time grows with their number, however they are spread."""

    def __init__(self, logits: Logits, weights: Weights) -> None:
        self._logits, self._weights = logits, weights
        self._bins: NDArray[np.uint16] | None = None
        self._inner: dict[int, tuple[NDArray[np.int64], Ranking]] = {}  # by bin, with its members
        top, bottom = logits.max(), logits.min()
        self._alike = bool(top == bottom)
        if self._alike:
            self.total = float(weights[0]) * len(weights)
            return
        with np.errstate(all="ignore"):
            scale = np.float32(BINS) / (top - bottom)
        if len(logits) <= FEW or not np.isfinite(scale):
            self._order = np.argsort(-logits, kind="stable")
            self._through = np.cumsum(weights[self._order])
        else:
            bins = ((top - logits) * scale).astype(np.uint16)
            self._bins = np.minimum(bins, BINS - 1, out=bins)
            self._through = np.cumsum(np.bincount(bins, weights, BINS))
        self.total = float(self._through[-1])

    def draw(self, top_k: int, top_p: float, uniform: float) -> int:
        """A token of the first `top_k`, and of those of the first that reach `top_p` together."""
        kept = self.total
        if top_k < len(self._logits):
            last, _ = Ranking(self._logits, np.ones(len(self._logits))).reach(top_k)
            kept = self._through_token(last)
        if top_p < 1.0:
            kept = min(kept, self.reach(top_p * kept)[1])
        return self.reach(uniform * kept, side="right")[0]

    def reach(self, mass: float, side: Literal["left", "right"] = "left") -> tuple[int, float]:
        """The first token with which the weights so far are `mass`, or with side `right` more; and
        what they are."""
        if self._alike:
            weight = float(self._weights[0])
            steps = mass / weight if weight > 0 else 0.0
            steps = steps if math.isfinite(steps) else 0.0
            at = math.floor(steps) if side == "right" else math.ceil(steps) - 1
            at = min(max(at, 0), len(self._weights) - 1)
            return at, (at + 1) * weight
        at = min(int(np.searchsorted(self._through, mass, side)), len(self._through) - 1)
        if self._bins is None:
            return int(self._order[at]), float(self._through[at])
        before = float(self._through[at - 1]) if at else 0.0
        if at not in self._inner:
            members = np.flatnonzero(self._bins == at)
            self._inner[at] = members, Ranking(self._logits[members], self._weights[members])
        members, inner = self._inner[at]
        token, through = inner.reach(mass - before, side)
        return int(members[token]), before + through

    def _through_token(self, token: int) -> float:
        logit = self._logits[token]
        better, equal = self._logits > logit, self._logits[: token + 1] == logit
        return float(self._weights[better].sum() + np.count_nonzero(equal) * self._weights[token])


def top_indices(logits: Logits, k: int) -> NDArray[np.int64]:
    """Indices of the k largest values, largest first; equal values in index order."""
    if k >= logits.shape[0]:
        found = np.arange(logits.shape[0])
    else:
        kth = logits[np.argpartition(logits, -k)[-k]]
        found = np.flatnonzero(~(logits < kth))  # with all that equal the last one
        if len(found) > 2 * k:
            better = np.flatnonzero(logits > kth)
            alike = np.flatnonzero(~((logits < kth) | (logits > kth)))[: k - len(better)]
            found = np.concatenate([better, alike])
    order: NDArray[np.int64] = found[np.argsort(-logits[found], kind="stable")][:k]
    return order


def _partition_function(logits: Logits, temperature: float) -> float:
    scaled = (logits - logits.max()) / np.float32(temperature)
    return float(np.exp(scaled).sum(dtype=np.float64))


def _penalize(logits: Logits, ids: Seq[int], penalty: float) -> Logits:
    seen = np.unique(np.asarray(ids, dtype=np.int64))
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def logprobs_of(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """Of a token and the `count` likeliest."""
    shift = float(logits.max()) + float(np.log(_partition_function(logits, 1.0)))
    top = [(int(i), float(logits[i]) - shift) for i in top_indices(logits, count)] if count else []
    return TokenLogprobs(float(logits[token]) - shift, top)
