"""Measures how far int8 is from fp32, in logits and in greedy text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.tables import Results, Row
from command.documents import read_documents
from command.logits import Reference
from engine import backends
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel
from engine.text.sentencepiece import SentencePieceTokenizer

COLUMNS = ("likeliest token the same", "logit error", "KL", "greedy texts the same")


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


def cells(measured: Results) -> Row:
    """Format a `command.logits.Comparison` for a table with `COLUMNS`."""
    return (
        f"{measured['top1_agreement']:.2%} of {measured['tokens']}",
        f"{measured['relative_logit_error']:.2%}",
        f"{measured['kl_divergence']:.1e}",
        f"{measured['same_texts']} of {measured['texts']}",
    )


def prompts_of(text: Path, tokenizer_file: Path, count: int, size: int) -> list[list[int]]:
    """Return `count` prompts of `size` ids, evenly spread over a text."""
    tokenizer = SentencePieceTokenizer(tokenizer_file)
    lines = (line for document in read_documents(text) for line in document)
    ids = [i for line in lines for i in tokenizer.encode(line)]
    begins = np.linspace(0, len(ids) - size, count, dtype=int).tolist()
    return [ids[begin : begin + size] for begin in begins]
