"""Chooses the next token of one row from its logits (V,)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from common.parameters import Parameters
from engine.backends.interface import Logits
from engine.native import library
from engine.rules import Ids, Rule
from engine.text.constraint import Constraint

Weights = NDArray[np.float64]

# The smallest temperature and penalty: smaller ones choose the same, but overflow float32.
MIN_DIVISOR = 1e-6


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and truncation."""

    chosen: float
    top: list[tuple[int, float]]  # of the most likely tokens, best first


class Sampler:
    """Chooses the tokens of one sequence; with a seed, equal logits give equal tokens."""

    def __init__(self, parameters: Parameters, index: int = 0, rules: Seq[Rule] = ()) -> None:
        self._p, self._rules = parameters, rules
        self._ids: Ids = np.zeros(0, np.int64)  # for the rules
        self._temperature = max(parameters.temperature, MIN_DIVISOR)
        given = {name: getattr(parameters, name) for name, _ in library.Truncation._fields_}
        given |= {"temperature": self._temperature, "top_k": max(parameters.top_k, 0)}
        self._truncation = library.Truncation(**given)
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
        """Choose the next token that `constraint` allows; add log-probabilities if requested.

        Raises `ArtifactError` as `check_finite`.
        """
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
        check_finite(raw[token])
        return token, None if p.logprobs is None else logprobs_of(raw, token, p.logprobs)

    def pick(self, logprobs: Weights) -> int:
        """Choose among whole texts by their log-probabilities (N,); return an index."""
        if self._random is None:
            return int(logprobs.argmax())
        weights = np.exp((logprobs - logprobs.max()) / self._temperature)
        through = weights.cumsum()
        return int(np.searchsorted(through, self._random.random() * through[-1], side="right"))

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
        assert self._random is not None
        uniform = self._random.random()  # one random number a token, whatever is truncated
        logits = np.ascontiguousarray(logits)
        scratch = np.empty(3 * len(logits), np.float32)
        token: int = library.draw_token(
            logits.ctypes.data, len(logits), self._truncation, uniform, scratch.ctypes.data
        )
        return token


def check_finite(number: float) -> None:
    """Raise `ArtifactError` for NaN or infinity, which damaged weights lead to."""
    if not math.isfinite(number):
        raise ArtifactError("the model's numbers are not finite: its weights are damaged")


def top_indices(logits: Logits, k: int) -> NDArray[np.int32]:
    """Indices of the k largest values, largest first; equal values in index order."""
    logits, scratch = np.ascontiguousarray(logits), np.empty(len(logits), np.float32)
    tokens = np.empty(len(logits), np.int32)
    count = library.largest_tokens(
        logits.ctypes.data, len(logits), k, tokens.ctypes.data, scratch.ctypes.data
    )
    tokens = np.sort(tokens[:count])
    return tokens[np.argsort(-logits[tokens], kind="stable")]


def logprobs_of(logits: Logits, token: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities of a token and of the `count` most likely tokens.

    Raises `ArtifactError` as `check_finite`.
    """
    logits, weights = np.ascontiguousarray(logits), np.empty(len(logits), np.float32)
    total = library.softmax_weights(logits.ctypes.data, len(logits), 1.0, weights.ctypes.data)
    shift = float(logits.max()) + math.log(total)
    check_finite(shift)
    top = [(int(i), float(logits[i]) - shift) for i in top_indices(logits, count)] if count else []
    return TokenLogprobs(float(logits[token]) - shift, top)
