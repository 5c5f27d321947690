"""Whole fine-tunes of a random base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.engine.artifacts.reading import read_safetensors
from tests.engine.hugging_face import write_json, write_weights
from tests.engine.models import params_of, write_params


def fine_tuned(path: Path, base: Path, *, seed: int = 0, size: float = 0.02, rank: int = 4) -> Path:
    """Writes a fine-tune of the v1 model in `base` into `path`; returns it.

    The change of each matrix has `size` times its norm in a few directions, and a third of that in
    all others, as trained changes have; vectors change, too.
    """
    rng = np.random.default_rng(2000 + seed)
    shutil.copytree(base, path, ignore=shutil.ignore_patterns("*.params", ".prepared"))
    weights = {name: changed(w, rng, size, rank) for name, w in params_of(base).items()}
    names = [name for name in weights if name.endswith("_logits_proj.weight")]
    for name in names:  # v1 files hold the tied matrix twice
        weights[name] = weights["_embed.weight"]
    write_params(path / "kogpt2.params", weights)
    return path


def with_more_tokens(
    path: Path, base: Path, tokens: Sequence[str], *, seed: int = 0, tied: bool = True
) -> Path:
    """Writes a fine-tune of the Hugging Face folder `base`, to whose tokenizer special tokens were
    added and whose embedding was resized for them, as transformers does it."""
    rng = np.random.default_rng(3000 + seed)
    shutil.copytree(base, path, ignore=shutil.ignore_patterns("*.safetensors", ".prepared"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(path / "tokenizer.json"))
    weights = {
        name: changed(np.array(w), rng, 0.02, 4)
        for name, w in read_safetensors(base / "model.safetensors").items()
    }
    embedding = weights["transformer.wte.weight"]
    spread = np.float32(embedding.std())
    more = spread * rng.standard_normal((len(tokens), embedding.shape[1]), np.float32)
    weights["transformer.wte.weight"] = np.concatenate([embedding, more])
    weights.pop("lm_head.weight", None)
    if not tied:
        weights["lm_head.weight"] = np.concatenate([changed(embedding, rng, 0.02, 4), -more])
    write_weights(path, list(weights.items()))
    fields = json.loads((path / "config.json").read_text("utf-8"))
    fields |= {"vocab_size": len(embedding) + len(tokens), "tie_word_embeddings": tied}
    write_json(path / "config.json", fields)
    return path


def changed(
    weight: NDArray[Any], rng: np.random.Generator, size: float, rank: int
) -> NDArray[np.float32]:
    weight = weight.astype(np.float32)
    if weight.ndim == 1:
        return weight + np.float32(size) * rng.standard_normal(weight.shape, np.float32)
    n, k = weight.shape
    thin = rng.standard_normal((n, rank), np.float32) @ rng.standard_normal((rank, k), np.float32)
    full = rng.standard_normal((n, k), np.float32)
    norm = size * np.linalg.norm(weight)
    change = thin / np.linalg.norm(thin) + full / np.linalg.norm(full) / 3
    return weight + np.float32(norm) * change


def change_metadata(file: Path, **changes: Any) -> None:
    """Changes metadata in the header of a safetensors file, or removes those that are None."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = {**header["__metadata__"], **changes}
    header["__metadata__"] = {name: x for name, x in metadata.items() if x is not None}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
