"""Measures how far int8 is from fp32, in logits and in greedy text.

In shapes: T tokens of one text, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from command.logits import divergence, greedy
from engine import backends
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel, Logits, Piece
from engine.text.sentencepiece import SentencePieceTokenizer


def forced(model: BackendModel, prompt: list[int], ids: list[int]) -> Logits:
    """Return the logits (T, V) with which the ids before predict each of `ids`."""
    row = model.open_row()
    results = [
        model.run([Piece(row, given)])[0].copy() for given in (prompt, *([i] for i in ids[:-1]))
    ]
    model.close_row(row)
    return np.stack(results)


def int8(folder: str) -> BackendModel:
    return backends.load(open_artifact(folder), "native", "int8")


def compare(
    folder: str,
    prompts: Sequence[list[int]] | Sequence[str],
    new_tokens: int,
    load: Callable[[str], BackendModel] = int8,
) -> dict[str, Any]:
    """Compare another precision of a model with fp32, on greedy texts of fp32.

    `prompts` are ids or texts.
    """
    artifact = open_artifact(folder)
    tokenizer = SentencePieceTokenizer(artifact.tokenizer_file)
    same = positions = agreed = 0
    worst = squares = power = kl = 0.0
    with (
        contextlib.closing(backends.load(artifact, "native", "fp32")) as exact,
        contextlib.closing(load(folder)) as other,
    ):
        for prompt in prompts:
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            made = greedy(exact, ids, new_tokens, tokenizer.eos_id)
            same += greedy(other, ids, new_tokens, tokenizer.eos_id) == made
            a, b = forced(exact, ids, made), forced(other, ids, made)
            positions += len(made)
            agreed += int((a.argmax(axis=-1) == b.argmax(axis=-1)).sum())
            worst = float(np.maximum(worst, np.abs(a - b).max()))  # NaN stays NaN
            squares += float(np.square(a - b, dtype=np.float64).mean(axis=-1).sum())
            power += float(a.var(axis=-1, dtype=np.float64).sum())
            kl += divergence(a, b)
    return {
        "texts": len(prompts),
        "same_texts": same,
        "tokens": positions,
        "top1_agreement": agreed / positions,
        "max_logit_error": worst,
        "rms_logit_error": float(np.sqrt(squares / positions)),
        "relative_logit_error": float(np.sqrt(squares / power)),
        "kl_divergence": kl / positions,
    }
