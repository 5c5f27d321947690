"""Merges an adapter into its base's weights, where it is not computed beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import ArtifactError
from engine.artifacts.adapter import BASE_NAMES, ROWS, WHOLE, Adapter
from engine.artifacts.artifact import EMBEDDING, OUTPUT, Artifact
from engine.artifacts.hugging_face import TOKENIZER_FILE
from engine.artifacts.tensor_index import Weights
from engine.prepared.folder import hash_of

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Merged(Artifact):
    """A base and an adapter as one model: `path` is the adapter's folder, `index` the base's."""

    base: Artifact
    adapter: Adapter

    @functools.cached_property
    def weights(self) -> Weights:
        """The merged weights, in fp32 where the adapter changes them. Raises `ArtifactError`."""
        base, adapter = self.base.weights, self.adapter.weights
        weights = dict(base)
        if not self.config.tie_word_embeddings:
            weights[OUTPUT] = base.get(OUTPUT, base[EMBEDDING])
        for name in adapter:
            if name.startswith(WHOLE) and not name.endswith(ROWS):
                weights[name.removeprefix(WHOLE)] = adapter[name]
        for name, (ids, rows) in self._rows().items():
            if name in weights:
                weights[name] = weights[name].astype(np.float32)
                weights[name][ids] = rows
        for module, scale in self.adapter.scales.items():
            layer, product = module.split(".")
            name = BASE_NAMES[product].format(layer)
            weights[f"{name}.weight"] = _merged(weights[f"{name}.weight"], adapter, module, scale)
            if f"{module}.bias" in adapter:
                weights[f"{name}.bias"] = adapter[f"{module}.bias"]
            if f"{module}.up_bias" in adapter:
                more = scale * adapter[f"{module}.up_bias"].astype(np.float32)
                weights[f"{name}.bias"] = weights[f"{name}.bias"].astype(np.float32) + more
        if self.config.tie_word_embeddings:
            weights.pop(OUTPUT, None)
        return weights

    def _rows(self) -> dict[str, tuple[Sequence[int], Floats]]:
        """Return the ids and values of the rows that were trained, by the matrix's name."""
        tokens, adapter = self.adapter.tokens, self.adapter.weights
        rows = {n: (ids, adapter[WHOLE + n + ROWS]) for n, ids in tokens.items() if ids}
        if self.base.config.tie_word_embeddings and OUTPUT not in tokens and rows:
            rows[OUTPUT] = rows[EMBEDDING]
        return rows


def _merged(weight: Floats, adapter: Weights, module: str, scale: float) -> Floats:
    """Return a matrix (outputs, inputs) with the adapter's product added.

    With DoRA, https://arxiv.org/abs/2402.09353, each output is scaled to its trained magnitude.
    """
    up, down = (adapter[f"{module}.{part}"].astype(np.float64) for part in ("up", "down"))
    whole = weight.astype(np.float64) + scale * (up @ down)
    if f"{module}.magnitude" in adapter:
        magnitude = adapter[f"{module}.magnitude"].astype(np.float64)
        whole *= (magnitude.reshape(-1) / np.linalg.norm(whole, axis=1))[:, None]
    return whole.astype(np.float32)


def merge(base: Artifact, adapter: Adapter) -> Merged:
    """Return a base with an adapter merged into it. Raises `ArtifactError` if it does not fit."""
    adapter.check_fits(base.config)
    index = adapter.index
    embedding, head = (index.get(WHOLE + name) for name in (EMBEDDING, OUTPUT))
    sizes = {tensor.shape[0] for tensor in (embedding, head) if tensor is not None}
    vocab_size = sizes.pop() if sizes else base.config.vocab_size
    tied = base.config.tie_word_embeddings and embedding is None and head is None
    tied = tied and OUTPUT not in adapter.tokens
    if sizes or (vocab_size != base.config.vocab_size and (embedding is None or head is None)):
        raise ArtifactError("the adapter brings an embedding and a head of different sizes")
    tokenizer_file = base.tokenizer_file
    if vocab_size != base.config.vocab_size:
        tokenizer_file = adapter.path / TOKENIZER_FILE
        if not tokenizer_file.is_file():
            raise ArtifactError(
                f"the adapter brings a vocabulary of {vocab_size} instead of"
                f" {base.config.vocab_size}, but no {TOKENIZER_FILE}"
            )
    return Merged(
        path=adapter.path,
        config=dataclasses.replace(base.config, vocab_size=vocab_size, tie_word_embeddings=tied),
        index=base.index,
        tokenizer_file=tokenizer_file,
        generation=adapter.generation.over(base.generation),
        content=hash_of(
            f"{base.content} {adapter.content} {sorted(adapter.scales.items())}"
            f" {sorted(adapter.tokens.items())}"
        ),
        classifier=adapter.classifier,
        base=base,
        adapter=adapter,
    )
