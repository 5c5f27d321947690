"""Compares models on texts: what int8 costs a model, and an adapter its fine-tune."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

from command.logits import Reference
from engine import backends
from engine.artifacts.artifact import Artifact
from engine.backends.interface import BackendModel
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
    """Computes what others are compared with, on texts, of which `max_tokens` are read.

    Where no text has two tokens, these are the model's own greedy texts, each after a random token.
    """
    windows = list(_windows(artifact, texts, max_tokens))
    prompts = [ids[:PROMPT] for ids in windows[:PROMPTS]]
    if not windows:
        ids = np.random.default_rng(0).integers(0, artifact.config.vocab_size, PROMPTS)
        prompts = [[i] for i in ids.tolist()]
    return Reference(model, prompts, NEW, windows=windows, progress=progress)


def _windows(artifact: Artifact, texts: Sequence[str], left: int) -> Iterator[list[int]]:
    """Yields the ids of texts in rows of at most `WINDOW`, `left` ids in all."""
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
    """Compares a model in int8 with fp32; returns a line for the user.

    Shows a progress bar, and a warning on stderr if int8 changes the model beyond the limits.

    name: of the model, for the warning
    cache_dir: where its prepared file in int8 is, if it has one
    """
    with (
        tempfile.TemporaryDirectory(prefix="compare-") as work,
        tqdm(total=2 * (NEW + 1), desc="comparing", disable=None, leave=False) as bar,
    ):
        folder = Path(work)
        with closing(backends.load(artifact, "native", "fp32", cache_dir=folder)) as exact:
            bar.update()
            expected = reference(artifact, exact, texts, MAX_TOKENS, bar.update)
        cache = cache_dir or folder
        with closing(backends.load(artifact, "native", "int8", cache_dir=cache)) as model:
            bar.update()
            c = expected.compare(model, progress=bar.update)
    if not (c.kl_divergence <= MAX_KL and c.top1_agreement >= MIN_AGREEMENT):  # or NaN
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
