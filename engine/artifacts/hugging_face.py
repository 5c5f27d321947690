"""Folders as transformers' `save_pretrained` writes them: KoGPT2 v2 and any other GPT-2.

Weights are in `model.safetensors` or `pytorch_model.bin`, whole or in shards, and stay mapped: a
Conv1D matrix [in, out] is a transposed view, not a copy.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from common.model_files import ADAPTER, DELTA, PARAMS, WEIGHT_FILES, visible
from engine.artifacts import artifact
from engine.artifacts import classifier as classifiers
from engine.artifacts.artifact import CONFIG_FILE, EMBEDDING, OUTPUT, POSITIONS, list_files
from engine.artifacts.config import KOGPT2, GPT2Config
from engine.artifacts.files import read_json
from engine.artifacts.generation_config import Generation, read_generation_config
from engine.artifacts.read_safetensors import index_safetensors
from engine.artifacts.read_torch import index_torch
from engine.artifacts.tensor_index import Index, check_count

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
ACTIVATION_ALIASES = {
    "gelu_python": "gelu",
    **dict.fromkeys(
        ("gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_new"
    ),
}
ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel", *classifiers.MODULES)
# Options that would change the computation, with the value that does not.
UNSUPPORTED: dict[str, Any] = {
    "add_cross_attention": False,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "pruned_heads": {},
}

# The names of a `GPT2Config`'s fields in `config.json`, with those of GPT2Config's attribute_map.
NAMES = {
    "vocab_size": ("vocab_size",),
    "units": ("n_embd", "hidden_size"),
    "num_layers": ("n_layer", "num_hidden_layers"),
    "num_heads": ("n_head", "num_attention_heads"),
    "max_length": ("n_positions", "max_position_embeddings"),
    "hidden_size": ("n_inner",),
    "activation": ("activation_function",),
    "layer_norm_eps": ("layer_norm_epsilon",),
}

NORM, PRODUCT = {"gamma": "weight", "beta": "bias"}, {"weight": "weight", "bias": "bias"}
# Our names of a block's parameters, and transformers' names without the `h.0.` in front.
BLOCK = {
    f"{ours}.{kind}": f"{theirs}.{their_kind}"
    for ours, theirs, kinds in (
        (artifact.ATTENTION_NORM, "ln_1", NORM),
        (artifact.QKV, "attn.c_attn", PRODUCT),
        (artifact.ATTENTION_OUT, "attn.c_proj", PRODUCT),
        (artifact.FFN_NORM, "ln_2", NORM),
        (artifact.FFN_HIDDEN, "mlp.c_fc", PRODUCT),
        (artifact.FFN_OUT, "mlp.c_proj", PRODUCT),
    )
    for kind, their_kind in kinds.items()
}
TABLES = {EMBEDDING: "wte.weight", POSITIONS: "wpe.weight"}
LAST = {f"{artifact.FINAL_NORM}.{kind}": f"ln_f.{theirs}" for kind, theirs in NORM.items()}
OUR_NAMES = {theirs: ours for ours, theirs in (TABLES | BLOCK | LAST).items()}
HEAD = "lm_head.weight"
TRUNK = "transformer."
MERGE = "merge it into its base (peft: merge_and_unload, then save_pretrained)"
# Attention masks that older versions of transformers saved beside the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias")


def is_in(folder: Path) -> bool:
    """Whether a folder has a model of Hugging Face's, rather than of KoGPT2 v1.

    Raises `ArtifactError` for a folder with both, with an adapter, or without a model.
    """
    names = {path.name for path in visible(folder)}
    theirs = any(name in names or f"{name}.index.json" in names for name in WEIGHT_FILES)
    ours = any(name.endswith(PARAMS) for name in names)
    if theirs and ours:
        raise ArtifactError(
            f"the folder holds both a v1 model (*.params) and one of Hugging Face's; it must"
            f" hold one (found: {list_files(folder)})"
        )
    if ADAPTER in names and theirs:
        raise ArtifactError(
            f"the folder holds a base model and an adapter ({ADAPTER}), which would not be"
            f" applied: {MERGE}, or remove {ADAPTER} to serve the base alone"
        )
    if ADAPTER in names:
        raise ArtifactError(
            f"the folder holds an adapter ({ADAPTER}), not a whole model: serve it beside its"
            f" base, or {MERGE}"
        )
    if DELTA in names and not ours and not theirs:
        raise ArtifactError(
            f"the folder holds a delta ({DELTA}), not a whole model: serve it beside its base"
        )
    if not ours and not theirs and not any(name.endswith(".spiece") for name in names):
        raise ArtifactError(
            f"the folder holds no model: neither *.params and *.spiece (KoGPT2 v1) nor"
            f" {CONFIG_FILE}, {WEIGHT_FILES[0]} and {TOKENIZER_FILE} (Hugging Face)"
            f" (found: {list_files(folder)})"
        )
    return theirs


def names(config: GPT2Config, prefix: str = TRUNK) -> Iterator[tuple[str, str, bool]]:
    """Yield each parameter's name here, its name in transformers, and if that is [in, out]."""
    blocks = (
        (ours.format(i), f"h.{i}.{theirs}")
        for i in range(config.num_layers)
        for ours, theirs in BLOCK.items()
    )
    for ours, theirs in (*TABLES.items(), *blocks, *LAST.items()):
        yield ours, prefix + theirs, is_transposed(ours)
    if not config.tie_word_embeddings:
        yield OUTPUT, head_name(prefix), False


def head_name(prefix: str) -> str:
    """Return the name of the output projection beside a trunk whose names have this prefix."""
    return prefix.removesuffix(TRUNK) + HEAD


def is_transposed(ours: str) -> bool:
    """Whether transformers stores a parameter, by our name, as [in, out] (linear layers)."""
    return ours.endswith(".weight") and ours not in (EMBEDDING, POSITIONS, OUTPUT)


def read(folder: Path, generation: Generation) -> artifact.Artifact:
    """Read and check a model's folder. Raises `ArtifactError` with what is missing or wrong."""
    for needed in (CONFIG_FILE, TOKENIZER_FILE):
        if not (folder / needed).is_file():
            advice = _tokenizer_advice(folder) if needed == TOKENIZER_FILE else ""
            raise ArtifactError(
                f"the folder holds no {needed} beside its weights{advice}"
                f" (found: {list_files(folder)})"
            )
    fields = read_json(folder / CONFIG_FILE)
    _refuse_unsupported(fields)
    given, untied = artifact.ConfigFile(fields, NAMES), fields.get("tie_word_embeddings") is False
    weights, file = _read_weights(folder)
    canonical, prefix = canonical_names(weights, file)
    head, wrapper = head_name(prefix), prefix.removesuffix(TRUNK)
    module = classifiers.module_of(fields, weights, wrapper)
    if module is not None:
        untied = False
    elif not fields.get("architectures") and head not in weights:
        artifact.check_no_classifier(weights, file)
    if untied and head not in weights:
        raise ArtifactError(
            f"{file} lacks {head}, and {CONFIG_FILE} says tie_word_embeddings false"
        )
    if not untied and artifact.differ(folder, weights.get(head), canonical[EMBEDDING]):
        # As transformers 5 does: older versions of peft write such files when they merge adapters.
        logger.warning(
            "%s: %s differs from %swte.weight, though %s ties them: the head is used",
            file, head, prefix, CONFIG_FILE,
        )  # fmt: skip
        untied = True
    if untied:
        canonical[OUTPUT] = weights[head]
    # reorder_and_upcast_attn changes nothing: attention is always computed in fp32 here.
    config = given.config(
        artifact.sizes(canonical, file, _their_names(1, prefix)),
        file,
        heads=12,
        activation="gelu_new",
        aliases=ACTIVATION_ALIASES,
        tie_word_embeddings=not untied,
        scale_attn_weights=given.flag("scale_attn_weights", True),
        scale_attn_by_inverse_layer_idx=given.flag("scale_attn_by_inverse_layer_idx", False),
    )
    artifact.check_weights(canonical, config, file, _their_names(config.num_layers, prefix))
    classifier = None
    if module is not None:
        classifier, tensors = classifiers.read_head(
            fields, CONFIG_FILE, weights, wrapper + module, file, config.units
        )
        canonical |= tensors
    tokenizer_file = artifact.check_plain(folder / TOKENIZER_FILE)
    settings = generation.over(read_generation_config(folder, fields))
    return artifact.Artifact(
        folder, config, canonical, tokenizer_file, settings, classifier=classifier
    )


def _tokenizer_advice(folder: Path) -> str:
    """Return what to do about a folder with another tokenizer than `tokenizer.json`."""
    names = [path.name for path in visible(folder)]
    if any(name.endswith(".spiece") for name in names):
        return (
            "; a .spiece is read beside a v1 model's *.params: put what"
            ' torch.save(model.state_dict(), "kogpt2.params") writes in place of the weights'
        )
    if "vocab.json" in names:
        return (
            "; vocab.json alone is not enough: save the tokenizer with use_fast=True, from"
            " vocab.json and merges.txt"
        )
    return ""


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    kind = fields.get("model_type", "gpt2")
    if kind != "gpt2":
        raise ArtifactError(f"{CONFIG_FILE}: model_type is {kind!r}, must be 'gpt2'")
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise ArtifactError(
            f"{CONFIG_FILE}: architectures is {architectures!r}, must be a list of names"
        )
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise ArtifactError(
                f"{CONFIG_FILE}: architectures has {architecture!r}, must be"
                f" {ARCHITECTURES[0]}, or {' or '.join(classifiers.MODULES)}"
            )
    for name, harmless in UNSUPPORTED.items():
        if fields.get(name, harmless) not in (harmless, None):
            raise ArtifactError(f"{CONFIG_FILE}: {name} {fields[name]!r} is not supported")
    for names in NAMES.values():
        given = {name: fields[name] for name in names if fields.get(name) is not None}
        if any(value != fields[next(iter(given))] for value in given.values()):
            values = " and ".join(f"{name} {value!r}" for name, value in given.items())
            raise ArtifactError(f"{CONFIG_FILE} says {values}: give one of them")


def _read_weights(folder: Path) -> tuple[Index, str]:
    """Index all tensors, by their names in the files; returns the first file's name, too."""
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return index_weights(folder / name), name
        index = folder / f"{name}.index.json"
        if index.exists():
            return _read_shards(index)
    raise AssertionError("is_in has found one")


def _read_shards(index: Path) -> tuple[Index, str]:
    """Index the tensors of all shards, which must be in the folder of the shards' index file."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ArtifactError(f"{index.name} has no weight_map")
    weights: Index = {}
    files = sorted({str(place) for place in places.values()})
    for name in files:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ArtifactError(f"{index.name} names {name}, which is not beside it")
        weights |= index_weights(index.parent / name)
        check_count(len(weights), index.name)
    if missing := set(places) - set(weights):
        raise ArtifactError(f"{index.name} names {min(missing)}, which no shard holds")
    return weights, files[0]


def index_weights(path: Path) -> Index:
    """Index the tensors in a file of safetensors or torch. Raises `ArtifactError`."""
    return index_safetensors(path) if path.suffix == ".safetensors" else index_torch(path)


def _their_names(num_layers: int, prefix: str) -> dict[str, tuple[str, bool]]:
    """Map our names to the names in a file and whether the parameters are transposed there."""
    config = dataclasses.replace(KOGPT2, num_layers=num_layers, tie_word_embeddings=False)
    return {ours: (theirs, transposed) for ours, theirs, transposed in names(config, prefix)}


def canonical_names(weights: Index, file: str) -> tuple[Index, str]:
    """Return weights by our names, Conv1D matrices transposed, and the prefix of their names."""
    wte, wpe = TABLES[EMBEDDING], TABLES[POSITIONS]
    prefix = artifact.shared_prefix(weights, wte, wpe, file, "GPT-2")
    canonical: Index = {}
    for name, value in weights.items():
        own = name.removeprefix(prefix)
        if not name.startswith(prefix) or own.endswith(BUFFERS):
            continue
        ours = our_name(own)
        if ours is None:
            if prefix or own.startswith("h."):
                raise ArtifactError(f"{file} holds {name}, which is not part of a GPT-2")
            continue  # a tensor beside a bare GPT2Model, such as a head
        canonical[ours] = value.T if is_transposed(ours) else value
    return canonical, prefix


def our_name(theirs: str) -> str | None:
    """Return our name of `h.0.attn.c_attn.weight`; None if it is no parameter of the trunk."""
    layer = re.match(r"h\.(\d{1,4})\.", theirs)  # as many digits as `sizes` can count
    ours = OUR_NAMES.get(theirs[layer.end() :] if layer else theirs)
    if ours is None or (ours in BLOCK) != (layer is not None):
        return None
    return ours.format(int(layer[1])) if layer else ours
