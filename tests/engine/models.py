"""Small KoGPT2 v1 artifacts with random weights and a real tokenizer, for tests."""

from __future__ import annotations

import functools
import io
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from engine.artifacts.artifact import EMBEDDING, OUTPUT, shapes
from engine.artifacts.config import GPT2Config
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
    prefix: str = "",
    embedding_seed: int | None = None,
) -> Path:
    """Writes `*.params`, `*.spiece` and `config.json` into `path`; returns it.

    `prefix` goes in front of every key, as in a fine-tune saved from a wrapper block. Two models
    with the same `embedding_seed` share their embedding. `vocab` must hold the tokenizer's pieces,
    160 at most.
    """
    config = GPT2Config(vocab, units, layers, heads, 4 * units, max_length, activation)
    weights = random_weights(config, seed)
    if embedding_seed is not None:
        weights[EMBEDDING] = random_weights(config, embedding_seed)[EMBEDDING]
    weights[OUTPUT] = weights[EMBEDDING]  # v1 files hold the tied matrix twice
    path.mkdir(parents=True, exist_ok=True)
    write_params(
        path / "kogpt2.params", {prefix + name: w.astype(dtype) for name, w in weights.items()}
    )
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
    """Writes what `mx.nd.save` would; the format is that of `engine.artifacts.read_params`."""
    codes = {"float32": 0, "float64": 1, "float16": 2}
    with path.open("wb") as file:
        file.write(struct.pack("<QQQ", 0x112, 0, len(arrays)))
        for array in arrays.values():
            file.write(struct.pack("<IiI", 0xF993FAC9, 0, array.ndim))
            file.write(struct.pack(f"<{array.ndim}q", *array.shape))
            file.write(struct.pack("<iii", 1, 0, codes[array.dtype.name]))
            file.write(np.ascontiguousarray(array).tobytes())
        file.write(struct.pack("<Q", len(arrays)))
        for name in arrays:
            encoded = name.encode()
            file.write(struct.pack("<Q", len(encoded)) + encoded)


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
