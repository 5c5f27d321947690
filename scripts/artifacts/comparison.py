"""Compares models on texts: what int8 costs a model, and a delta its fine-tune."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from command.logits import Comparison, Reference
from engine import backends
from engine.artifacts.artifact import Artifact
from engine.backends.interface import BackendModel
from engine.native.delta_folder import read_folder
from engine.native.model import NativeModel
from engine.native.prepared import num_bytes, prepared
from engine.text.prompts import Prompts

MAX_TOKENS = 512  # of texts, compared in int8: 100 MB of logits for a vocabulary of 50,000
WINDOW = 128  # tokens compared in one row
PROMPT, NEW, PROMPTS = 8, 20, 12  # tokens of a greedy text's prompt and answer; texts
# Limits of the warning. On a real checkpoint of this size int8 and llama.cpp's Q8_0 have a KL of
# 0.004 to 0.007 with 95% to 97% of the likeliest tokens; where a format fails, as one scale a row
# does without a rotation, 0.04 to 0.07 with 86% to 88%. The limits are between; nearer ones would
# warn of chance, because 240 tokens give the share to within 3 points.
MAX_KL = 0.02
MIN_AGREEMENT = 0.9


def reference(
    artifact: Artifact,
    model: BackendModel,
    texts: Sequence[str],
    max_tokens: int,
    progress: Callable[[int], object] = lambda steps: None,
) -> Reference:
    """Compute what others are compared with, on texts, of which `max_tokens` are read.

    Where no text has two tokens, these are the model's own greedy texts, each after a random token.
    """
    windows = list(_windows(artifact, texts, max_tokens))
    prompts = [ids[:PROMPT] for ids in windows[:PROMPTS]]
    if not windows:
        ids = np.random.default_rng(0).integers(0, artifact.config.vocab_size, PROMPTS)
        prompts = [[i] for i in ids.tolist()]
    return Reference(model, prompts, NEW, windows=windows, progress=progress)


def _windows(artifact: Artifact, texts: Sequence[str], left: int) -> Iterator[list[int]]:
    """Yield the ids of texts in rows of at most `WINDOW`, `left` ids in all."""
    size = min(WINDOW, artifact.config.max_length)
    tokenizer = Prompts(artifact).tokenizer
    for text in texts:
        if left < 2:
            return
        row = [i for i in tokenizer.encode(text)[:left] if i < artifact.config.vocab_size]
        for at in range(0, len(row), size):
            if len(ids := row[at : at + size]) > 1:
                yield ids
                left -= len(ids)


def report(
    name: Path, artifact: Artifact, texts: Sequence[str], cache_dir: Path | None = None
) -> str:
    """Compare a model in int8 with fp32; return a line for the user.

    Shows a progress bar, and a warning on stderr if int8 changes the model beyond the limits.

    name: of the model, for the warning
    cache_dir: where its prepared file in int8 is, if it has one
    """
    with (
        tempfile.TemporaryDirectory(prefix="compare-") as work,
        _bar(models=2) as bar,
    ):
        expected = _expected(artifact, texts, Path(work), bar)
        c = _in_int8(artifact, expected, cache_dir or Path(work), bar)
    if _is_beyond(c):
        print(
            f"{name}: int8 changes this model too much (limits: KL {MAX_KL}, likeliest token"
            f" {MIN_AGREEMENT:.0%}):",
            'put {"precision": "fp32"} into its serving.json',
            file=sys.stderr,
        )
    return (
        f"int8 against fp32: KL {c.kl_divergence:.1e}, likeliest token the same for"
        f" {c.top1_agreement:.1%} of {c.tokens}, greedy texts for {c.same_texts} of {c.texts}"
    )


def report_delta(
    name: Path, folder: Path, whole: Artifact, base: Artifact, texts: Sequence[str], cache_dir: Path
) -> list[str]:
    """Compare a delta, and the whole model in int8, with that in fp32; returns a table.

    Shows a progress bar, and a warning on stderr if the delta changes the model beyond the limits.

    name: of the delta, for the warning
    folder: of the delta
    cache_dir: for prepared files
    """
    delta = read_folder(folder)
    with _bar(models=3) as bar:
        expected = _expected(whole, texts, cache_dir, bar)
        in_int8 = _in_int8(whole, expected, cache_dir, bar)
        with (
            closing(NativeModel(prepared(base, "int8", cache_dir))) as model,
            closing(delta.open(base, cache_dir).load()) as adapter,
        ):
            bar.update()
            c = expected.compare(model, adapter, bar.update)
    if _is_beyond(c):
        print(
            f"{name}: the delta changes this model too much (limits: KL {MAX_KL}, likeliest token"
            f" {MIN_AGREEMENT:.0%}): serve the whole model",
            file=sys.stderr,
        )
    sizes = {"delta": delta.num_bytes, "int8": num_bytes(whole.config, "int8")}
    lines = [f"against fp32      size  likeliest token  KL, nats  greedy texts, of {c.texts}"]
    for (kind, size), each in zip(sizes.items(), (c, in_int8), strict=True):
        lines.append(
            f"{kind:<12} {size / 1e6:>6.1f} MB  {each.top1_agreement:>15.1%}"
            f"  {each.kl_divergence:>8.1e}  {each.same_texts:>12}"
        )
    return lines


def _bar(models: int) -> tqdm[Any]:
    """A progress bar over opening models and making their texts."""
    return tqdm(total=models * (NEW + 1), desc="comparing", disable=None, leave=False)


def _expected(
    artifact: Artifact, texts: Sequence[str], cache_dir: Path, bar: tqdm[Any]
) -> Reference:
    with closing(backends.load(artifact, "native", "fp32", cache_dir=cache_dir)) as exact:
        bar.update()
        return reference(artifact, exact, texts, MAX_TOKENS, bar.update)


def _in_int8(
    artifact: Artifact, expected: Reference, cache_dir: Path, bar: tqdm[Any]
) -> Comparison:
    with closing(backends.load(artifact, "native", "int8", cache_dir=cache_dir)) as model:
        bar.update()
        return expected.compare(model, progress=bar.update)


def _is_beyond(c: Comparison) -> bool:
    """Whether a model is changed beyond the limits, or gives NaN."""
    return not (c.kl_divergence <= MAX_KL and c.top1_agreement >= MIN_AGREEMENT)
