"""Measures how far int8 is from fp32, in logits and in greedy text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from command.logits import Reference
from engine import backends
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel
from engine.text.sentencepiece import SentencePieceTokenizer


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
    ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    with (
        contextlib.closing(backends.load(artifact, "native", "fp32")) as exact,
        contextlib.closing(load(folder)) as other,
    ):
        reference = Reference(exact, ids, new_tokens, eos=tokenizer.eos_id)
        return dataclasses.asdict(reference.compare(other))
