"""Small KoGPT2 v1 artifacts with random weights and a real tokenizer, for tests."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from command import model_writer
from engine.artifacts.artifact import EMBEDDING, OUTPUT, shapes
from engine.artifacts.config import GPT2Config
from engine.artifacts.read_params import read_params
from tests.engine.sentences import SENTENCES

SYMBOLS = ["<usr>", "<sys>", "<unused0>", "<unused1>"]
MAX_PIECES = 160


def make_artifact(
    path: Path,
    *,
    layers: int = 2,
    units: int = 64,
    heads: int = 2,
    vocab: int = 500,
    max_length: int = 128,
    activation: str = "gelu",
    seed: int = 0,
    dtype: str = "float32",
) -> Path:
    """Writes `*.params`, `*.spiece` and `config.json` into `path`; returns it.

    `vocab` must hold the tokenizer's pieces, 160 at most.
    """
    config = GPT2Config(vocab, units, layers, heads, 4 * units, max_length, activation)
    weights = random_weights(config, seed)
    weights[OUTPUT] = weights[EMBEDDING]  # v1 files hold the tied matrix twice
    path.mkdir(parents=True, exist_ok=True)
    write_params(path / "kogpt2.params", {n: w.astype(dtype) for n, w in weights.items()})
    (path / "kogpt2.spiece").write_bytes(spiece())
    (path / "config.json").write_text(
        json.dumps({"num_heads": heads, "activation": activation}), encoding="utf-8"
    )
    return path


def random_weights(config: GPT2Config, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights large enough that attention looks around and greedy text does not stand still."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(config):
        w = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("gamma"):
            w = 1 + np.float32(0.1) * w
        else:
            w *= np.float32(1 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1)
        weights[name] = w
    return weights


def write_params(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    model_writer.write_params(path, arrays.items())


def params_of(folder: Path) -> dict[str, NDArray[Any]]:
    """Copies of the parameters in a folder of `make_artifact`."""
    return {n: np.array(w) for n, w in read_params(folder / "kogpt2.params").items()}


@functools.cache
def spiece(size: int = MAX_PIECES, byte_fallback: bool = False) -> bytes:
    """A sentencepiece BPE model with the special pieces of KoGPT2 v1 at their ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        hard_vocab_limit=False,
        byte_fallback=byte_fallback,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        user_defined_symbols=SYMBOLS,
        minloglevel=2,
    )
    return model.getvalue()
