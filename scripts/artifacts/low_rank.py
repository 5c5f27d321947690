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
from command.logits import Comparison
from command.model_writer import write_adapter
from engine.artifacts.adapter import BASE_NAMES
from engine.artifacts.artifact import Artifact
from engine.native.adapter import LowRank, NativeAdapter
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from scripts.artifacts.comparison import reference

RANKS = (4, 8, 16, 32, 64)
MAX_TOKENS = 2048  # tokens compared in all
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
) -> Iterator[tuple[int, Comparison]]:
    """Compares a fine-tune with its base and each of these adapters, in fp32.

    Yields the bytes of each in fp16, and the comparison.
    """
    with (
        tempfile.TemporaryDirectory(prefix="convert-") as work,
        closing(NativeModel(prepared(whole, "fp32", Path(work)))) as whole_model,
        closing(NativeModel(prepared(base, "fp32", Path(work)))) as base_model,
    ):
        expected = reference(whole, whole_model, texts, MAX_TOKENS)
        for matrices in adapters:
            adapter = NativeAdapter.of(base.config, "fp32", matrices)
            size = sum(2 * (m.down.size + m.up.size) for m in matrices.values())
            yield size, expected.compare(base_model, adapter)


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
    for each, (size, c) in zip(ranks, compare(whole, base, texts, adapters), strict=True):
        lines.append(
            f"{each or 'base':>4} {size / 1e6:>7.1f} MB  {c.top1_agreement:>15.1%}"
            f"  {c.kl_divergence:>8.3g}  {c.same_texts:>6} of {c.texts}"
        )
    outside = {name: change for name, change in delta.others.items() if change > 1e-6}
    if outside:
        worst = max(outside, key=outside.__getitem__)
        lines.append(
            f"{len(outside)} parameters that adapters cannot hold differ and stay as in the base:"
            f" {worst} most, by {outside[worst]:.1%} of its norm"
        )
    return lines
