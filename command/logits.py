"""Compares two models by their logits and greedy texts. Shapes: T tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.interface import Adapter, BackendModel, Logits, Piece


def logits_after(
    model: BackendModel, ids: Sequence[int], count: int = 1, adapter: Adapter | None = None
) -> Logits:
    """Return the logits (count, V) after each of the last `count` of `ids`."""
    row = model.open_row()
    result = model.run([Piece(row, ids, count, adapter)]).copy()
    model.close_row(row)
    return result


def greedy(
    model: BackendModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    eos: int | None = None,
    adapter: Adapter | None = None,
    progress: Callable[[int], object] = lambda steps: None,
) -> list[list[int]]:
    """Decode greedily, all prompts together; return the new ids of each.

    A text ends with `eos`, with the context, or after `new_tokens` steps.
    """
    texts = [list[int]() for _ in prompts]
    rows = [model.open_row() for _ in prompts]
    for _ in range(new_tokens):
        going = [
            i
            for i, (row, text) in enumerate(zip(rows, texts, strict=True))
            if text[-1:] != [eos] and row.length < model.config.max_length
        ]
        pieces = [Piece(rows[i], texts[i][-1:] or prompts[i], adapter=adapter) for i in going]
        for i, logits in zip(going, model.run(pieces) if pieces else (), strict=True):
            texts[i].append(int(logits.argmax()))
        progress(1)
    for row in rows:
        model.close_row(row)
    return texts


@dataclass(frozen=True)
class Comparison:
    """How far a model is from another: totals of greedy texts, means over tokens."""

    texts: int
    same_texts: int
    tokens: int
    top1_agreement: float  # share of tokens for which the likeliest one is the same
    kl_divergence: float  # nats
    max_logit_error: float
    rms_logit_error: float
    relative_logit_error: float  # rms, of the logits' standard deviation


class Reference:
    """The greedy texts and logits of a model with which others are compared."""

    def __init__(
        self,
        model: BackendModel,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        eos: int | None = None,
        windows: Sequence[Sequence[int]] = (),
        progress: Callable[[int], object] = lambda steps: None,
    ) -> None:
        """Compute greedy texts after `prompts`, and logits after each token of `windows`.

        Without windows, logits are those that predict the greedy texts.
        """
        self._prompts, self._new_tokens, self._eos = prompts, new_tokens, eos
        self._texts = greedy(model, prompts, new_tokens, eos, progress=progress)
        rows = [(ids, len(ids)) for ids in windows] or [
            ([*prompt, *text[:-1]], len(text))
            for prompt, text in zip(prompts, self._texts, strict=True)
        ]
        self._rows = [(*row, logits_after(model, *row)) for row in rows]

    def compare(
        self,
        model: BackendModel,
        adapter: Adapter | None = None,
        progress: Callable[[int], object] = lambda steps: None,
    ) -> Comparison:
        """Compare a model, or a base with an adapter, with the reference."""
        texts = greedy(model, self._prompts, self._new_tokens, self._eos, adapter, progress)
        pairs = (
            (exact, logits_after(model, ids, count, adapter)) for ids, count, exact in self._rows
        )
        return comparison(pairs, self._texts, texts)


def comparison(
    pairs: Iterable[tuple[Logits, Logits]],
    texts: Sequence[list[int]],
    others: Sequence[list[int]],
) -> Comparison:
    """Compare pairs of exact and other logits (T, V), and greedy texts."""
    tokens, agreed, kl, worst, squares, power = 0, 0, 0.0, 0.0, 0.0, 0.0
    for exact, logits in pairs:
        error = logits - exact
        tokens += len(exact)
        agreed += int((logits.argmax(axis=-1) == exact.argmax(axis=-1)).sum())
        kl += divergence(exact, logits)
        worst = float(np.maximum(worst, np.abs(error).max()))  # NaN stays NaN
        squares += float(np.square(error, dtype=np.float64).mean(axis=-1).sum())
        power += float(exact.var(axis=-1, dtype=np.float64).sum())
    return Comparison(
        texts=len(texts),
        same_texts=sum(a == b for a, b in zip(texts, others, strict=True)),
        tokens=tokens,
        top1_agreement=agreed / tokens,
        kl_divergence=kl / tokens,
        max_logit_error=worst,
        rms_logit_error=float(np.sqrt(squares / tokens)),
        relative_logit_error=float(np.sqrt(squares / power)),
    )


def divergence(exact: Logits, other: Logits) -> float:
    """Return the Kullback-Leibler divergence of logits (T, V), in nats, summed over the tokens."""
    p, q = _log_softmax(exact), _log_softmax(other)
    return float((np.exp(p) * (p - q)).sum())


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    x = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]
