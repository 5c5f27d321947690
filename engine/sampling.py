"""Choosing the next token of one row from its logits (V,), in numpy.

For a vocabulary of 50,000 a full sort costs milliseconds and a partition half of one, so nothing
here does either: where few tokens can be drawn they are those above a bound, and only those are
sorted; where there may be many, as on a flat distribution, `Ranking` finds a place among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from common.parameters import Parameters
from engine.native import library
from engine.rules import Ids, Rule
from engine.text.constraint import Constraint

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]

FEW = 512  # at most so many tokens are sorted, more are ranked in bins
GROUP = 50  # logits of a group; for the k largest, only the largest of each group is compared first
CHUNK = 256  # weights of a chunk; a token is searched for in one of them
BINS = 4096  # of a ranking. More: fewer tokens to rank in a bin, more bins to add up
# The smallest temperature and penalty: smaller ones choose the same, but overflow float32.
MIN_DIVISOR = 1e-6


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a step, before temperature and truncation."""

    chosen: float
    top: list[tuple[int, float]]  # of the most likely tokens, best first


class Sampler:
    """Draws the tokens of one sequence: with the same parameters and logits the same ones."""

    def __init__(self, parameters: Parameters, index: int = 0, rules: Seq[Rule] = ()) -> None:
        self._p, self._rules = parameters, rules
        self._ids: Ids = np.zeros(0, np.int64)  # for the rules
        self._temperature = max(parameters.temperature, MIN_DIVISOR)
        self._penalty = max(parameters.repetition_penalty, MIN_DIVISOR)
        self._counts: Counter[int] | None = None  # of the answer's tokens
        if parameters.frequency_penalty or parameters.presence_penalty:
            self._counts = Counter()
        self._known = 0  # how many of the sequence's ids are in `_seen`
        self._seen: set[int] = set()
        self._biased = np.array([token for token, _ in parameters.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in parameters.logit_bias], np.float32)
        seed = None if parameters.seed is None else parameters.seed + index
        self._random = np.random.Generator(np.random.PCG64(seed)) if parameters.do_sample else None

    def choose(
        self, logits: Logits, ids: Seq[int], constraint: Constraint | None = None
    ) -> tuple[int, TokenLogprobs | None]:
        """The next token that `constraint` allows, and its log-probabilities if wanted."""
        p = self._p
        raw = logits
        if p.repetition_penalty != 1.0 or self._counts or self._biased.size or self._rules:
            logits = logits.copy()
            self._adjust(logits, ids)
        # A forced token takes no random number, so that skipping its step changes no answer.
        if constraint is None:
            token = int(logits.argmax()) if self._random is None else self._draw(logits)
        elif self._random is None or constraint.forced is not None:
            token = constraint.likeliest(logits)
        else:
            values, tokens = constraint.allowed(logits)
            token = int(tokens[self._draw(values)])
        return token, None if p.logprobs is None else logprobs_of(raw, token, p.logprobs)

    def pick(self, logprobs: Weights) -> int:
        """The index of the most likely of some whole texts, or of one that is drawn."""
        if self._random is None:
            return int(logprobs.argmax())
        weights = np.exp((logprobs - logprobs.max()) / self._temperature)
        return _at(weights.cumsum(), self._random.random())

    def accept(self, token: int) -> None:
        """Count a token of the answer, chosen or forced."""
        if self._counts is not None:
            self._counts[token] += 1

    def _adjust(self, logits: Logits, ids: Seq[int]) -> None:
        p = self._p
        if p.repetition_penalty != 1.0:
            self._seen.update(ids[self._known :])
            self._known = len(ids)
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / self._penalty, values * self._penalty)
        logits[self._biased] += self._biases
        if self._counts:
            tokens = np.fromiter(self._counts.keys(), np.int64)
            counts = np.fromiter(self._counts.values(), np.float32)
            logits[tokens] -= p.frequency_penalty * counts + p.presence_penalty
        if self._rules:
            self._ids = np.append(self._ids, np.array(ids[len(self._ids) :], np.int64))
        for rule in self._rules:
            rule(logits, self._ids)

    def _draw(self, logits: Logits) -> int:
        p = self._p
        assert self._random is not None
        uniform = self._random.random()  # one number a token, whatever is truncated below
        size = len(logits)
        whole: float | None = None
        top_k = p.top_k if 0 < p.top_k < size else size
        if top_k < size:
            candidates = _largest(logits, top_k)
        else:
            weights, whole = _all_weights(logits, self._temperature)
            if p.top_p == 1.0:
                if p.min_p:
                    weights[weights < p.min_p] = 0
                if p.typical_p < 1.0:
                    return _drawn_typical(logits, weights, p.typical_p, uniform)
                return _drawn(weights, uniform)
            # The others have less than 1 - top_p together.
            candidates = np.flatnonzero(~(weights < (1 - p.top_p) * whole / size))
        logits = logits[candidates]
        few: Weights = np.exp((logits - logits.max()).astype(np.float64) / self._temperature)
        if len(candidates) > FEW:
            ranking = Ranking(logits, few)
            mass_in_reach = ranking.mass(top_k, p.top_p, whole, p.min_p)
            if p.typical_p == 1.0:
                return int(candidates[ranking.reach(uniform * mass_in_reach, side="right")[0]])
            last = ranking.reach(mass_in_reach)[0]
            equal = np.flatnonzero(logits[: last + 1] == logits[last])
            inside = np.append(np.flatnonzero(logits > logits[last]), equal)
            logits, few = logits[inside], few[inside]
            return int(candidates[inside[_drawn_typical(logits, few, p.typical_p, uniform)]])
        order = np.argsort(-logits, kind="stable")[:top_k]
        through = np.cumsum(few[order])
        whole = whole or through[-1]
        # Tokens before which less than top_p has gathered.
        cumulative = through[: np.searchsorted(through, p.top_p * whole) + 1]
        if p.min_p:
            cumulative = cumulative[: max(np.count_nonzero(few[order] >= p.min_p), 1)]
        if p.typical_p < 1.0:
            order = order[: len(cumulative)]
            logits, few = logits[order], few[order]
            return int(candidates[order[_drawn_typical(logits, few, p.typical_p, uniform)]])
        return int(candidates[order[_at(cumulative, uniform)]])


def _all_weights(logits: Logits, temperature: float) -> tuple[Logits, float]:
    """Weights in proportion to the probabilities, 1 of the likeliest token; and their sum.

    They are in single precision, which takes a tenth of the time.
    """
    logits, weights = np.ascontiguousarray(logits), np.empty(len(logits), np.float32)
    addresses = logits.ctypes.data, weights.ctypes.data
    total = library.softmax_weights(addresses[0], len(logits), temperature, addresses[1])
    return weights, total


def _drawn_typical(logits: Logits, weights: NDArray[Any], mass: float, uniform: float) -> int:
    """Draw one of the typical tokens.

    These are the tokens whose surprisal, -log p, is nearest to its mean, the entropy: the fewest
    that have `mass` of all weight, and those that are as near.

    Meister et al. 2022, "Locally Typical Sampling", https://arxiv.org/abs/2202.00666, section 4; as
    transformers' TypicalLogitsWarper.
    """
    total = float(weights.sum())
    # Surprisals are logits but for a sum and a factor, which change no order of distances.
    logits = logits - logits.max()
    mean = float(weights @ logits) / total
    # The unlikely ones have less than 1 - mass together, so the likely ones suffice, unless one of
    # the others is as near. Where only few are unlikely, selecting the likely ones saves no time.
    likely = np.flatnonzero(weights >= (1 - mass) * total / len(weights))
    if 0 < len(likely) < len(weights) / 2:
        some, likely_weights = logits[likely], weights[likely]
        distances = np.abs(some - mean)
        farthest = _farthest(distances, likely_weights, mass * total)
        if farthest <= mean - some.min():
            near = np.flatnonzero(distances <= farthest)
            return int(likely[near[_drawn(likely_weights[near], uniform)]])
    distances = np.abs(logits - mean)
    far = distances > _farthest(distances, weights, mass * total)
    return _drawn(np.where(far, np.float32(0), weights), uniform)


def _farthest(distances: NDArray[Any], weights: NDArray[Any], mass: float) -> float:
    """The distance of the last of the nearest tokens that together weigh `mass`."""
    ranking = Ranking(-distances, weights.astype(np.float64))  # bincount is slow with others
    return float(distances[ranking.reach(mass)[0]])


def _drawn(weights: NDArray[Any], uniform: float) -> int:
    """Draw a token: first the chunk that it is in, then its place there."""
    begins = np.arange(0, len(weights), CHUNK)
    through = np.cumsum(np.add.reduceat(weights, begins), dtype=np.float64)
    chunk = _at(through, uniform)
    before = through[chunk - 1] if chunk else 0.0
    share = (uniform * through[-1] - before) / (through[chunk] - before)
    within = np.cumsum(weights[begins[chunk] :][:CHUNK], dtype=np.float64)
    return int(begins[chunk]) + _at(within, share)


def _at(cumulative: Weights, uniform: float) -> int:
    at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounded up to the end, it is the last with any weight.
    return at if at < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1]))


class Ranking:
    """All tokens, best first, equal ones in index order, without sorting them.

    They are put into bins of similar logits, and only one bin is ranked further. Time grows with
    their number, however they are distributed.
    """

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

    def mass(self, top_k: int, top_p: float, whole: float | None, min_p: float) -> float:
        """The weight of the tokens that truncation leaves.

        These are the first `top_k`, of them those that reach `top_p` of their weight, or of
        `whole`, and of them those that weigh at least `min_p`.
        """
        mass = whole or self.total
        if top_k < len(self._logits):
            last, _ = Ranking(self._logits, np.ones(len(self._logits))).reach(top_k)
            mass = self._through_token(last)
        if top_p < 1.0:
            mass = min(mass, self.reach(top_p * mass)[1])
        if min_p:
            mass = min(mass, float(self._weights[self._weights >= min_p].sum()))
        return mass

    def reach(self, mass: float, side: Literal["left", "right"] = "left") -> tuple[int, float]:
        """The first token at which weights sum to `mass` (`right`: exceed it), and the sum."""
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
    candidates = np.arange(len(logits)) if k >= len(logits) else _largest(logits, k)
    if len(candidates) > 2 * k:  # many are equal, or lie in few groups
        near = logits[candidates]
        kth = near[np.argpartition(near, -k)[-k]]
        better = np.flatnonzero(near > kth)
        alike = np.flatnonzero(~((near < kth) | (near > kth)))[: max(k - len(better), 0)]
        candidates = candidates[np.concatenate([better, alike])]
    order: NDArray[np.int64] = candidates[np.argsort(-logits[candidates], kind="stable")][:k]
    return order


def _largest(logits: Logits, k: int) -> NDArray[np.int64]:
    """Indices of the k < V largest values and of some more, with all equals of each."""
    size = min(GROUP, len(logits) // (4 * k))
    if size < 2:
        bound = np.partition(logits, -k)[-k]
    else:  # as many groups have one that is not below
        groups = len(logits) // size
        largest = logits[: groups * size].reshape(size, groups).max(axis=0)
        bound = np.partition(largest, -k)[-k]
    return np.flatnonzero(~(logits < bound))


def logprobs_of(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """The log-probabilities of a token and of the `count` most likely ones."""
    shift = float(logits.max()) + math.log(_all_weights(logits, 1.0)[1])
    top = [(int(i), float(logits[i]) - shift) for i in top_indices(logits, count)] if count else []
    return TokenLogprobs(float(logits[token]) - shift, top)
