"""A checked model folder, and its weights by the same names for all kinds of artifacts.

The names are those of KoGPT2 v1, with linear layers as [out, in], whatever the folder holds.
`engine.artifacts.v1` reads v1's `.params`, `engine.artifacts.hugging_face` folders of transformers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from common.model_files import visible
from engine.artifacts.config import ACTIVATIONS, GPT2Config
from engine.artifacts.files import open_file
from engine.artifacts.generation_config import Generation
from engine.artifacts.tensor_index import Index, Weights, map_index

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

DTYPES = ("float32", "float16", "bfloat16")
CONFIG_FILE = "config.json"
MIN_EPSILON = 1e-12


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


# The names of a `GPT2Config`'s sizes in a `config.json`, of which the first that exists counts:
# Hugging Face's files may also have a max_length, which is a setting of generation.
SIZE_NAMES = {
    "vocab_size": ("vocab_size",),
    "units": ("units", "n_embd"),
    "num_layers": ("num_layers", "n_layer"),
    "max_length": ("n_positions", "max_length"),
    "hidden_size": ("hidden_size", "n_inner"),
}


def _wrong(name: str, value: Any, must: str) -> ArtifactError:
    return ArtifactError(f"{CONFIG_FILE}: {name} is {value!r}, must {must}")


class ConfigFile:
    """A `config.json`, whose fields have several names."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def get(self, *names: str, default: Any = None) -> Any:
        return next((self._given[n] for n in names if self._given.get(n) is not None), default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise _wrong(name, value, "be true or false")
        return value

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
        num_heads, units = self.get("num_heads", "n_head", default=heads), sizes["units"]
        if type(num_heads) is not int or num_heads < 1 or units % num_heads:
            raise _wrong("num_heads", num_heads, f"divide the {units} units")
        name = self.get("activation", "activation_function", default=activation)
        activation = aliases.get(name, name) if isinstance(name, str) else name
        if activation not in ACTIVATIONS:
            raise _wrong("activation", name, f"be one of {', '.join(ACTIVATIONS)}")
        epsilon = self.get("layer_norm_eps", "layer_norm_epsilon", default=1e-5)
        # A smaller epsilon has no effect beside a variance in fp32.
        if not isinstance(epsilon, float) or not MIN_EPSILON <= epsilon < 1:
            raise _wrong("layer_norm_eps", epsilon, f"be at least {MIN_EPSILON} and below 1")
        for size, names in SIZE_NAMES.items():
            configured = self.get(*names, default=sizes[size])
            if configured != sizes[size]:
                raise ArtifactError(
                    f"{CONFIG_FILE} says {size} {configured!r}, but {file} has {sizes[size]}"
                )
        return GPT2Config(
            **sizes, num_heads=num_heads, activation=activation, layer_norm_eps=epsilon, **flags
        )


def shared_prefix(weights: Index, embedding: str, positions: str, otherwise: str) -> str:
    """Return the prefix that a wrapper put in front of names, or "". Raises `ArtifactError`."""
    prefixes = [name.removesuffix(positions) for name in weights if name.endswith(positions)]
    fitting = [prefix for prefix in prefixes if prefix + embedding in weights]
    if not fitting:
        keys = ", ".join(list(weights)[:3]) or "none"
        raise ArtifactError(f"{otherwise}: no {embedding} beside a {positions} (keys: {keys}, ...)")
    return min(fitting, key=len)


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
            allowed = "float16, bfloat16 or float32"
            raise ArtifactError(f"{file}: {name} is {weights[ours].dtype}, must be {allowed}")
    for name in set(weights) - expected:
        del weights[name]
