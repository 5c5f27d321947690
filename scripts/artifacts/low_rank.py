"""Approximates a whole fine-tune by a LoRA adapter.

Its matrices are the largest singular vectors of the difference between the fine-tune's and the
base's weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from command.errors import Problem
from command.logits import divergence, greedy, logits_after
from command.model_writer import write_adapter
from engine.artifacts.adapter import BASE_NAMES
from engine.artifacts.artifact import Artifact
from engine.native.adapter import LowRank, NativeAdapter
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.text.prompts import Prompts

RANKS = (4, 8, 16, 32, 64)
MAX_TOKENS = 2048  # tokens compared in all
WINDOW = 128  # tokens compared in one row
PROMPT, NEW, PROMPTS = 8, 20, 12  # tokens of a greedy text's prompt and answer; texts
Floats = NDArray[np.float32]
Module = tuple[int, str]


@dataclass(frozen=True)
class Difference:
    """The difference between a fine-tune and its base, as singular vectors of each matrix."""

    modules: dict[Module, tuple[Floats, Floats]]  # up (n, all), down (all, k)
    others: dict[str, float]  # by other parameter: norm of its change over norm of the base's

    def of_rank(self, rank: int) -> dict[Module, LowRank]:
        return {
            module: LowRank(down[:rank], up[:, :rank])
            for module, (up, down) in self.modules.items()
        }


def difference(whole: Artifact, base: Artifact, progress: Callable[[int], object]) -> Difference:
    """Computes the difference of two models. Raises `Problem` if their configurations differ."""
    if whole.config != base.config:
        raise Problem(
            f"{whole.path} is no fine-tune of {base.path}: their configurations differ"
            f" ({whole.config} and {base.config})"
        )
    modules, matrices = {}, set()
    for layer in range(base.config.num_layers):
        for product, pattern in BASE_NAMES.items():
            name = f"{pattern.format(layer)}.weight"
            matrices.add(name)
            delta = whole.weights[name].astype(np.float64) - base.weights[name]
            modules[layer, product] = _factors(delta)
            progress(whole.weights[name].nbytes)
    others = {}
    for name, weight in whole.weights.items():
        if name not in matrices:
            before = base.weights[name].astype(np.float64)
            change = float(np.linalg.norm(weight - before))
            others[name] = change / max(float(np.linalg.norm(before)), 1e-12)
    return Difference(modules, others)


def _factors(delta: NDArray[np.float64]) -> tuple[Floats, Floats]:
    """Factors `delta` (n, k) into up (n, m) and down (m, k), the largest singular values first.

    Uses the eigenvectors of the smaller Gram matrix, which loses singular values below 1e-8 of the
    largest; an fp16 adapter cannot hold those.
    """
    wide = delta.shape[0] < delta.shape[1]
    gram = delta @ delta.T if wide else delta.T @ delta
    vectors = np.linalg.eigh(gram)[1][:, ::-1]  # (m, m), in falling order
    up, down = (vectors, vectors.T @ delta) if wide else (delta @ vectors, vectors.T)
    return up.astype(np.float32), down.astype(np.float32)


def compare(
    whole: Artifact, base: Artifact, texts: Sequence[str], adapters: Iterable[dict[Module, LowRank]]
) -> Iterator[dict[str, float]]:
    """Compares a fine-tune with its base and each of these adapters, in fp32.

    Yields `bytes` in fp16, `same` (share of equal likeliest tokens), `kl` in nats, and `texts`, the
    number of equal greedy texts of `of`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="convert-") as work,
        closing(NativeModel(prepared(whole, "fp32", Path(work)))) as whole_model,
        closing(NativeModel(prepared(base, "fp32", Path(work)))) as base_model,
    ):
        windows = list(_windows(whole, texts))
        expected = [logits_after(whole_model, ids, len(ids)) for ids in windows]
        prompts = [ids[:PROMPT] for ids in windows[:PROMPTS]]
        answers = [greedy(whole_model, prompt, NEW) for prompt in prompts]
        tokens = sum(map(len, windows))
        for matrices in adapters:
            adapter = NativeAdapter.of(base.config, "fp32", matrices)
            same = kl = 0.0
            for ids, wanted in zip(windows, expected, strict=True):
                logits = logits_after(base_model, ids, len(ids), adapter)
                same += float((logits.argmax(1) == wanted.argmax(1)).sum())
                kl += divergence(wanted, logits)
            adapted = (greedy(base_model, prompt, NEW, adapter=adapter) for prompt in prompts)
            yield {
                "bytes": sum(2 * (m.down.size + m.up.size) for m in matrices.values()),
                "same": same / tokens,
                "kl": kl / tokens,
                "texts": sum(a == b for a, b in zip(adapted, answers, strict=True)),
                "of": len(answers),
            }


def _windows(artifact: Artifact, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yields the texts' ids in rows of at most `WINDOW`; random ids if no text has two tokens."""
    c, left = artifact.config, MAX_TOKENS
    size = min(WINDOW, c.max_length - NEW)
    encode = Prompts(artifact).encode
    rows = [ids for text in texts if text.strip() and len(ids := encode(text)) > 1]
    if not rows:
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, c.vocab_size, size).tolist() for _ in range(PROMPTS)]
    for row in rows:
        for at in range(0, len(row), size):
            ids = row[at : at + size][:left]
            if len(ids) < 2:
                continue
            yield ids
            left -= len(ids)
            if left <= 0:
                return


def to_adapter(
    whole: Artifact,
    base: Artifact,
    target: Path,
    rank: int,
    texts: Sequence[str],
    progress: Callable[[int], object],
) -> list[str]:
    """Writes an adapter of `rank`; returns lines with the cost of each rank for the user."""
    if not 1 <= rank <= base.config.units:
        raise Problem(f"--rank is {rank}, must be from 1 to {base.config.units}, the model's units")
    delta = difference(whole, base, progress)
    write_adapter(target, base.path.name, delta.of_rank(rank), rank)
    lines = ["rank       size  likeliest token  KL, nats  greedy texts"]
    ranks = [0, *sorted({rank, *(r for r in RANKS if r <= base.config.units)})]
    adapters = (delta.of_rank(each) if each else {} for each in ranks)
    for each, row in zip(ranks, compare(whole, base, texts, adapters), strict=True):
        lines.append(
            f"{each or 'base':>4} {row['bytes'] / 1e6:>7.1f} MB  {row['same']:>15.1%}"
            f"  {row['kl']:>8.3g}  {row['texts']:>6.0f} of {row['of']:.0f}"
        )
    outside = {name: change for name, change in delta.others.items() if change > 1e-6}
    if outside:
        worst = max(outside, key=outside.__getitem__)
        lines.append(
            f"{len(outside)} parameters that adapters cannot hold differ and stay as in the base:"
            f" {worst} most, by {outside[worst]:.1%} of its norm"
        )
    return lines
