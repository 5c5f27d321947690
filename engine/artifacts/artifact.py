"""A checked model folder, and its weights by the same names for all kinds of artifacts.

The names are those of KoGPT2 v1, with linear layers as [out, in], whatever the folder holds.
`engine.artifacts.v1` reads v1's `.params`, `engine.artifacts.hugging_face` folders of transformers.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ArtifactError
from common.model_files import visible
from engine.artifacts.classifier import Classifier
from engine.artifacts.config import ACTIVATIONS, GPT2Config
from engine.artifacts.files import open_file
from engine.artifacts.generation_config import Generation
from engine.artifacts.tensor_index import Index, Tensor, Weights, map_index

EMBEDDING = "_embed.weight"
POSITIONS = "_pos_embed.weight"
OUTPUT = "_logits_proj.weight"
QKV = "_self_attention_layers.{}._multi_head_qkv_proj"
ATTENTION_OUT = "_self_attention_layers.{}._out_proj"
FFN_HIDDEN = "_ffn_layers.{}._hidden_map"
FFN_OUT = "_ffn_layers.{}._out_map"
ATTENTION_NORM = "_attn_ln.{}"
FFN_NORM = "_ffn_ln.{}"
FINAL_NORM = "_final_ln"
# The products and LayerNorms of a block, by their names in the native library.
PRODUCTS = {
    "qkv": QKV,
    "attention_out": ATTENTION_OUT,
    "ffn_hidden": FFN_HIDDEN,
    "ffn_out": FFN_OUT,
}
NORMS = {"attention_norm": ATTENTION_NORM, "ffn_norm": FFN_NORM}

DTYPES = ("float16", "bfloat16", "float32", "float64")
CONFIG_FILE = "config.json"
MIN_EPSILON = 1e-12
ROWS = 4096  # rows of two matrices that are compared at once
CLASSIFIER = re.compile(r"(?:^|\.)(?:score|classifier|qa_outputs)(?:\.\d+)?\.weight$")

logger = logging.getLogger(__name__)


class MappedWeights:
    """The tensors of a model's folder, mapped by an index of its files."""

    path: Path
    index: Index

    @functools.cached_property
    def weights(self) -> Weights:
        """The weights, mapped. Raises `ArtifactError` if the files have changed."""
        return map_index(self.path, self.index)

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return tuple(self.path / name for name in sorted({t.file for t in self.index.values()}))


@dataclass(frozen=True)
class Artifact(MappedWeights):
    """A checked model folder: its configuration and where its weights are."""

    path: Path
    config: GPT2Config
    index: Index
    tokenizer_file: Path  # `*.spiece` or `tokenizer.json`
    generation: Generation = field(default_factory=Generation)
    content: str = ""  # the hash of the weights, once they have been read
    classifier: Classifier | None = None  # its head's tensors are in the index

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.config.num_parameters


def shapes(config: GPT2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a model's parameters, without a tied output projection."""
    c = config
    yield EMBEDDING, (c.vocab_size, c.units)
    yield POSITIONS, (c.max_length, c.units)
    for i in range(c.num_layers):
        for name, out, wide in (
            (QKV, 3 * c.units, c.units),
            (ATTENTION_OUT, c.units, c.units),
            (FFN_HIDDEN, c.hidden_size, c.units),
            (FFN_OUT, c.units, c.hidden_size),
        ):
            yield f"{name.format(i)}.weight", (out, wide)
            yield f"{name.format(i)}.bias", (out,)
        for name in NORMS.values():
            yield f"{name.format(i)}.gamma", (c.units,)
            yield f"{name.format(i)}.beta", (c.units,)
    yield f"{FINAL_NORM}.gamma", (c.units,)
    yield f"{FINAL_NORM}.beta", (c.units,)
    if not c.tie_word_embeddings:
        yield OUTPUT, (c.vocab_size, c.units)


def list_files(folder: Path) -> str:
    return ", ".join([path.name for path in visible(folder)][:20]) or "nothing"


def check_plain(path: Path) -> Path:
    """Return the path. Raises `ArtifactError` unless it is a file that can be read."""
    with open_file(path):
        return path


SIZES = ("vocab_size", "units", "num_layers", "num_heads", "max_length", "hidden_size")
# The names of a `GPT2Config`'s fields in the `config.json` of a v1 model, of which the first that
# exists counts. Hugging Face's files may also have a max_length, which is a setting of generation.
V1_NAMES = {
    "vocab_size": ("vocab_size",),
    "units": ("units", "n_embd"),
    "num_layers": ("num_layers", "n_layer"),
    "num_heads": ("num_heads", "n_head"),
    "max_length": ("n_positions", "max_length"),
    "hidden_size": ("hidden_size", "n_inner"),
    "activation": ("activation", "activation_function"),
    "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
}


def wrong_field(name: str, value: Any, must: str) -> ArtifactError:
    return ArtifactError(f"{CONFIG_FILE}: {name} is {value!r}, must {must}")


@dataclass(frozen=True)
class ConfigFile:
    """A `config.json`, and the names of each field in it, as in `V1_NAMES`."""

    given: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]]

    def get(self, field: str, default: Any) -> tuple[str, Any]:
        """Return a field's name in the file and its value."""
        names = self.names[field]
        return next(
            ((n, self.given[n]) for n in names if self.given.get(n) is not None),
            (names[0], default),
        )

    def flag(self, name: str, default: bool) -> bool:
        value = self.given.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_field(name, value, "be true or false")
        return default if value is None else value

    def config(
        self,
        sizes: Mapping[str, Any],
        file: str,
        *,
        heads: int,
        activation: str,
        aliases: Mapping[str, str],
        **flags: bool,
    ) -> GPT2Config:
        """Return the configuration of a model whose weights, in `file`, have these sizes.

        `heads` and `activation` are defaults, `aliases` other names of activations. Raises
        `ArtifactError`, also if `config.json` has other sizes.
        """
        units = sizes["units"]
        name, num_heads = self.get("num_heads", None)
        if num_heads is None:
            num_heads = heads
            logger.info(
                "%s: %s does not give %s: %d heads of %d are assumed",
                file, CONFIG_FILE, name, heads, units // heads,
            )  # fmt: skip
        if type(num_heads) is not int or num_heads < 1 or units % num_heads:
            raise wrong_field(name, num_heads, f"divide the {units} units")
        name, value = self.get("activation", activation)
        activation = aliases.get(value, value) if isinstance(value, str) else value
        if activation not in ACTIVATIONS:
            raise wrong_field(name, value, f"be one of {', '.join(ACTIVATIONS)}")
        name, epsilon = self.get("layer_norm_eps", 1e-5)
        # A smaller epsilon has no effect beside a variance in fp32.
        if not isinstance(epsilon, float) or not MIN_EPSILON <= epsilon < 1:
            raise wrong_field(name, epsilon, f"be at least {MIN_EPSILON} and below 1")
        for size, value in sizes.items():
            name, configured = self.get(size, value)
            if configured != value:
                raise ArtifactError(
                    f"{CONFIG_FILE} says {name} {configured!r}, but {file} has {value}"
                )
        return GPT2Config(
            **sizes, num_heads=num_heads, activation=activation, layer_norm_eps=epsilon, **flags
        )


def shared_prefix(weights: Index, embedding: str, positions: str, file: str, kind: str) -> str:
    """Return the prefix that a wrapper put in front of names, or "". Raises `ArtifactError`.

    embedding, positions: names of the two tables
    kind: what `file` is not, if it holds no such tables
    """
    prefixes = [name.removesuffix(positions) for name in weights if name.endswith(positions)]
    fitting = sorted((p for p in prefixes if p + embedding in weights), key=len)
    if not fitting:
        keys = ", ".join(list(weights)[:3]) or "none"
        raise ArtifactError(
            f"{file} is not a {kind}: no {embedding} beside a {positions} (keys: {keys}, ...)"
        )
    first, *others = fitting
    for other in others:
        # A module that a wrapper holds under two names is saved twice, from the same place.
        own = {n.removeprefix(other): w for n, w in weights.items() if n.startswith(other)}
        if any(weights.get(first + name) != tensor for name, tensor in own.items()):
            raise ArtifactError(
                f"{file} holds two GPT-2s, {first}* and {other}*, must hold one: save the one to"
                " serve by itself"
            )
    return first


def check_no_classifier(weights: Index, file: str) -> None:
    """Raise `ArtifactError` for the head of a classifier, as transformers' and wrappers call it."""
    if head := next(filter(CLASSIFIER.search, weights), None):
        raise ArtifactError(
            f"{file} holds {head}, the head of a classifier, but not as transformers saves one:"
            " serve it with a script (code/inference.py), or save GPT2ForSequenceClassification"
        )


def differ(folder: Path, head: Tensor | None, embedding: Tensor) -> bool:
    """Return whether a head that is tied to an embedding is there with other numbers."""
    if head is None or head == embedding or head.shape != embedding.shape:
        return False
    pair = map_index(folder, {OUTPUT: head, EMBEDDING: embedding})
    return any(
        not np.array_equal(pair[OUTPUT][at : at + ROWS], pair[EMBEDDING][at : at + ROWS])
        for at in range(0, head.shape[0], ROWS)
    )


# For error messages: a parameter's name in the file, and whether it is transposed there.
FileNames = Mapping[str, tuple[str, bool]]


def sizes(weights: Index, file: str, called: FileNames | None = None) -> dict[str, Any]:
    """Return the sizes of a `GPT2Config` for weights by our names. Raises `ArtifactError`."""
    for name in (EMBEDDING, POSITIONS, FFN_HIDDEN.format(0) + ".weight"):
        if name not in weights or weights[name].ndim != 2 or not weights[name].size:
            raise ArtifactError(f"{file} has no matrix {(called or {}).get(name, (name,))[0]}")
    vocab_size, units = weights[EMBEDDING].shape
    return {
        "vocab_size": vocab_size,
        "units": units,
        "num_layers": _count_layers(weights),
        "hidden_size": weights[FFN_HIDDEN.format(0) + ".weight"].shape[0],
        "max_length": weights[POSITIONS].shape[0],
    }


def _count_layers(weights: Index) -> int:
    """Return one more than the highest layer of any parameter: `check_weights` finds gaps."""
    blocks = map(re.escape, (PRODUCTS | NORMS).values())
    pattern = re.compile("|".join(block.replace(r"\{\}", r"(\d{1,4})") for block in blocks))
    matches = (pattern.match(name) for name in weights)
    return 1 + max(int(m[m.lastindex or 0]) for m in matches if m)


def check_weights(
    weights: Index, config: GPT2Config, file: str, called: FileNames | None = None
) -> None:
    """Check that each parameter exists with its shape, as floats; remove all other tensors."""
    expected = set()
    for ours, shape in shapes(config):  # lazily: `num_layers` may be any number
        expected.add(ours)
        name, transposed = (called or {}).get(ours, (ours, False))
        if ours not in weights:
            raise ArtifactError(f"{file} lacks {name}")
        if weights[ours].shape != shape:
            actual, needed = (s[::-1] if transposed else s for s in (weights[ours].shape, shape))
            raise ArtifactError(f"{file}: {name} is {actual}, must be {needed}")
        if weights[ours].dtype not in DTYPES:
            allowed = " or ".join(DTYPES)
            raise ArtifactError(f"{file}: {name} is {weights[ours].dtype}, must be {allowed}")
    for name in set(weights) - expected:
        del weights[name]
