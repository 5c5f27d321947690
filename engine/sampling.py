"""Choosing the next token of one row from its logits (V,), in numpy.

For a vocabulary of 50,000 a full sort costs milliseconds, so nothing here sorts it: the likeliest
tokens are found by partition, and only those are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.parameters import Parameters

Logits = NDArray[np.float32]

TOP_P_CANDIDATES = 256
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
        seed = None if parameters.seed is None else parameters.seed + index
        self._random = np.random.Generator(np.random.PCG64(seed)) if parameters.do_sample else None

    def choose(self, logits: Logits, ids: Seq[int]) -> tuple[int, TokenLogprobs | None]:
        """The next token after `ids`, with log-probabilities where they were asked for."""
        p = self._p
        raw = logits
        if p.repetition_penalty != 1.0:
            logits = _penalize(logits, ids, self._penalty)
        token = int(logits.argmax()) if self._random is None else self._draw(logits)
        return token, None if p.logprobs is None else _logprobs(raw, token, p.logprobs)

    def _draw(self, logits: Logits) -> int:
        p = self._p
        assert self._random is not None
        uniform = self._random.random()  # one number per token, whatever is cut off below
        size = logits.shape[0]
        top_k = p.top_k if 0 < p.top_k < size else size
        if top_k < size:
            candidates = top_indices(logits, top_k)
        elif p.top_p < 1.0:
            candidates = _nucleus_candidates(logits, self._temperature, p.top_p)
        else:
            candidates = None
        chosen = logits if candidates is None else logits[candidates]
        weights = np.exp((chosen - chosen.max()).astype(np.float64) / self._temperature)
        if p.top_p < 1.0:
            whole = weights.sum()
            if top_k == size and candidates is not None:
                whole = _partition_function(logits, self._temperature)
            # Candidates come best first: keep those before which less than top_p has gathered.
            before = np.cumsum(weights) - weights
            weights = weights[~(before >= p.top_p * whole)]
        cumulative = np.cumsum(weights)
        at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        at = min(at, len(cumulative) - 1)
        return at if candidates is None else int(candidates[at])


def top_indices(logits: Logits, k: int) -> NDArray[np.int64]:
    """Indices of the k largest values, largest first; equal values in index order."""
    if k >= logits.shape[0]:
        found = np.arange(logits.shape[0])
    else:
        kth = logits[np.argpartition(logits, -k)[-k]]
        found = np.flatnonzero(~(logits < kth))  # with all that equal the last one
    order: NDArray[np.int64] = found[np.argsort(-logits[found], kind="stable")][:k]
    return order


def _partition_function(logits: Logits, temperature: float) -> float:
    scaled = (logits - logits.max()) / np.float32(temperature)
    return float(np.exp(scaled).sum(dtype=np.float64))


def _nucleus_candidates(logits: Logits, temperature: float, top_p: float) -> NDArray[np.int64]:
    """The likeliest tokens that together reach top_p, and a few more, best first."""
    whole = _partition_function(logits, temperature)
    count = TOP_P_CANDIDATES
    while True:
        candidates = top_indices(logits, count)
        scaled = (logits[candidates] - logits.max()).astype(np.float64) / temperature
        if count >= logits.shape[0] or np.exp(scaled).sum() >= top_p * whole:
            return candidates
        count *= 8


def _penalize(logits: Logits, ids: Seq[int], penalty: float) -> Logits:
    seen = np.unique(np.asarray(ids, dtype=np.int64))
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def _logprobs(logits: Logits, token: int, count: int) -> TokenLogprobs:
    shift = float(logits.max()) + float(np.log(_partition_function(logits, 1.0)))
    top = [(int(i), float(logits[i]) - shift) for i in top_indices(logits, count)] if count else []
    return TokenLogprobs(float(logits[token]) - shift, top)
