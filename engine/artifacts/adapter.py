"""LoRA adapters as PEFT's `save_pretrained` writes them.

`adapter_config.json`, and the matrices in `adapter_model.safetensors` or `adapter_model.bin`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from common.model_files import ADAPTER
from engine.artifacts import adapter_config, artifact
from engine.artifacts import classifier as classifiers
from engine.artifacts.artifact import EMBEDDING, OUTPUT, list_files
from engine.artifacts.classifier import BIAS, WEIGHT, Classifier
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import read_json
from engine.artifacts.generation_config import Generation, read_generation
from engine.artifacts.hugging_face import (
    HEAD,
    MERGE,
    TOKENIZER_FILE,
    TRUNK,
    index_weights,
    is_transposed,
    our_name,
)
from engine.artifacts.tensor_index import Index, Tensor

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# The linear layers of a GPT-2 block, as transformers names them, and our names of them.
PRODUCTS = {
    "attn.c_attn": "qkv",
    "attn.c_proj": "attention_out",
    "mlp.c_fc": "ffn_hidden",
    "mlp.c_proj": "ffn_out",
}
BASE_NAMES = artifact.PRODUCTS
PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_B.bias": "up_bias",
    "bias": "bias",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
PEFT = "base_model.model."  # in front of names
WHOLE = "="  # in front of the name of a parameter that the adapter replaces
ROWS = ".rows"  # at the end of the name if only some rows of the parameter are replaced
TRAINED_TOKENS = ".token_adapter.trainable_tokens_delta"
MODULE = re.compile(rf"(?:.*\.)?h\.(\d{{1,4}})\.({'|'.join(map(re.escape, PRODUCTS))})")


@dataclass(frozen=True)
class Adapter(artifact.MappedWeights):
    """The tensors of a checked LoRA adapter, and how they change its base.

    index: by names such as `3.qkv.down` (rank, inputs) and `3.qkv.up` (outputs, rank) the matrices;
        `3.qkv.bias` (outputs,) is the layer's new bias, `3.qkv.up_bias` is scaled and added to its
        bias, `3.qkv.magnitude` (outputs,) is DoRA's; `WHOLE` and a parameter's name is its new
        value; with `ROWS` at the end, the new values of the rows in `tokens`
    tokens: ids of rows that were trained, by the parameter's name; a head tied to the embedding
        gets the embedding's rows unless it has an entry
    scales: the factors of `up`, by names such as `3.qkv`
    """

    path: Path
    base: str  # the name or path of the model that it was trained on
    index: Index
    scales: Mapping[str, float]
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    generation: Generation = field(default_factory=Generation)
    content: str = ""
    classifier: Classifier | None = None  # its head's tensors are in the index

    def described(self, base: artifact.Artifact) -> artifact.Artifact:
        """Return the base with the adapter's tokenizer and generation settings, if it has them."""
        own = self.path / TOKENIZER_FILE
        return replace(
            base,
            generation=self.generation.over(base.generation),
            tokenizer_file=own if own.is_file() else base.tokenizer_file,
        )

    def changes_bias(self, module: str) -> bool:
        """Whether the bias beside a module's product, such as `3.qkv`, was trained."""
        return any(f"{module}.{part}" in self.index for part in ("bias", "up_bias"))

    @property
    def is_thin(self) -> bool:
        """Whether the adapter has no tensors that must be merged into its base's weights."""
        return not any(n.startswith(WHOLE) or n.endswith(".magnitude") for n in self.index)

    def check_fits(self, config: GPT2Config) -> None:
        """Raise `ArtifactError` unless the tensors fit a base of this configuration."""
        base = dict(artifact.shapes(replace(config, tie_word_embeddings=False)))
        head = {name: self.index[name] for name in (WEIGHT, BIAS) if name in self.index}
        if self.classifier is not None:
            unfit = "the adapter does not fit its base"
            self.classifier.check_head(head, config.units, unfit)
        for name, tensor in self.index.items():
            if name in head:
                continue
            what, shape = self._expected(name, config, base)
            if tensor.shape != shape:
                raise ArtifactError(
                    f"the adapter does not fit its base: {what} must be {shape}"
                    f" instead of {tensor.shape}"
                )

    def _expected(
        self, name: str, config: GPT2Config, base: Mapping[str, tuple[int, ...]]
    ) -> tuple[str, tuple[int, ...] | None]:
        """Return a description of a tensor and its required shape. Raises `ArtifactError`."""
        if name.endswith(ROWS):
            matrix = name.removeprefix(WHOLE).removesuffix(ROWS)
            ids, whole = self.tokens[matrix], self.index.get(WHOLE + matrix)
            size = whole.shape[0] if whole else config.vocab_size
            if max(ids) >= size:
                raise ArtifactError(
                    f"{ADAPTER}: trainable_token_indices has {max(ids)}, but the vocabulary has"
                    f" {size}"
                )
            return f"the trained rows of {matrix}", (len(ids), config.units)
        if name.startswith(WHOLE):
            ours, shape = name.removeprefix(WHOLE), self.index[name].shape
            if ours in (EMBEDDING, OUTPUT) and len(shape) == 2:
                return ours, (shape[0], config.units)  # the vocabulary may have another size
            return ours, base.get(ours)
        layer, product, part = name.split(".")
        if int(layer) >= config.num_layers:
            raise ArtifactError(
                f"the adapter has matrices for layer {layer}, but its base has"
                f" {config.num_layers} layers (from 0)"
            )
        rank = self.index[f"{layer}.{product}.down"].shape[0]
        if rank > config.units:
            raise ArtifactError(
                f"the adapter has rank {rank} in layer {layer}, more than the"
                f" {config.units} units of its base: serve a whole model instead ({MERGE})"
            )
        outputs, inputs = base[f"{BASE_NAMES[product].format(layer)}.weight"]
        shapes = {"down": (rank, inputs), "up": (outputs, rank)}
        return f"{part} of {product} in layer {layer}", shapes.get(part, (outputs,))


def read(path: str | Path) -> Adapter:
    """Read and check the adapter in a folder. Raises `ArtifactError`, which names the fault."""
    folder = Path(path)
    config = read_json(folder / ADAPTER)
    adapter_config.check_kind(config)
    base = config.get("base_model_name_or_path")
    weights, file = _read_weights(folder)
    weights = {name: w for name, w in weights.items() if not _is_copy(name, weights)}
    classifier, index = _head(folder, config, weights, file)
    trained, tokens = _tokens(config), dict[str, list[int]]()
    called: dict[str, str] = {}  # PEFT's names of the modules
    for name, tensor in weights.items():
        if (whole := _whole(name)) is None:
            module, part, its_name = _place(name, file)
            index[f"{module}.{part}"] = _checked(name, tensor, file)
            if part != "bias":
                called[module] = its_name
            continue
        _checked(name, tensor, file)
        index[WHOLE + whole] = tensor.T if is_transposed(whole) else tensor
        if whole.endswith(ROWS):
            matrix = whole.removesuffix(ROWS)
            # PEFT may save the rows of a tied head, too: their ids are then the embedding's.
            tokens[matrix] = trained.get(matrix) or trained.get(EMBEDDING, [])
            if not tokens[matrix]:
                raise ArtifactError(f"{ADAPTER} lacks the trainable_token_indices of {name}")
            if ".transformer." not in name and matrix == EMBEDDING:  # PEFT's model had no head
                tokens.setdefault(OUTPUT, [])
    for name in [name for name in index if name.endswith(".bias") and name[0].isdecimal()]:
        module = name.removesuffix(".bias")
        if module not in called:  # trained without a matrix
            layer, product = module.split(".")
            index[f"{WHOLE}{BASE_NAMES[product].format(layer)}.bias"] = index.pop(name)
    if not index.keys() - {WEIGHT, BIAS}:
        raise ArtifactError(f"{file} holds no matrices of an adapter")
    scales = {}
    with adapter_config.patterns_limit():
        for module, its_name in sorted(called.items()):
            adapter_config.check_targeted(config, its_name, file)
            _check_parts(config, index, module, its_name, file)
            rank = _check_pair(index, module, its_name, file)
            scales[module] = adapter_config.scale(config, its_name, rank)
    base = base if isinstance(base, str) else ""
    generation = read_generation(folder)
    return Adapter(folder, base, index, scales, tokens, generation, classifier=classifier)


def _head(
    folder: Path, config: Mapping[str, Any], weights: Index, file: str
) -> tuple[Classifier | None, Index]:
    """Return what an adapter's head is, and its tensors by our names; remove them from `weights`.

    PEFT saves no names of labels: they are in a `config.json` beside the adapter, if there is one.
    """
    modules = adapter_config.CLASSIFIERS
    module = modules.get(str(config.get("task_type")))
    if module is None and config.get("task_type") is not None:
        return None, {}
    head: Index = {}
    for name in list(weights):
        own = name.removeprefix(PEFT).replace(".modules_to_save.", ".")
        if own.rpartition(".")[0] in ([module] if module else modules.values()):
            head[own] = weights.pop(name)
    if module is None:
        if not head:
            return None, {}
        module = min(head).rpartition(".")[0]
    fields, source = read_json(folder / artifact.CONFIG_FILE), artifact.CONFIG_FILE
    weight = head.get(f"{module}.weight")
    if not fields and weight is not None and weight.shape:
        fields, source = {"num_labels": weight.shape[0]}, ADAPTER
    return classifiers.read_head(fields, source, head, module, file)


def _read_weights(folder: Path) -> tuple[Index, str]:
    for name in WEIGHT_FILES:
        if (folder / name).exists():
            return index_weights(folder / name), name
    raise ArtifactError(
        f"the folder holds {ADAPTER}, but no {WEIGHT_FILES[0]} beside it"
        f" (found: {list_files(folder)})"
    )


def _place(name: str, file: str) -> tuple[str, str, str]:
    """Return a tensor's module, its part, and PEFT's name of the module.

    `base_model.model.transformer.h.3.attn.c_attn.lora_A.weight` has `3.qkv`, `down` and
    `transformer.h.3.attn.c_attn`.
    """
    for part, ours in PARTS.items():
        where = name.removesuffix(f".{part}").removesuffix(".base_layer")
        module = MODULE.fullmatch(where)
        if name.endswith(f".{part}") and module:
            called = where.removeprefix(PEFT)
            return f"{int(module[1])}.{PRODUCTS[module[2]]}", ours, called
    raise ArtifactError(
        f"{file} holds {name}, which is no LoRA matrix of {', '.join(PRODUCTS)}: {MERGE}"
    )


def _whole(name: str) -> str | None:
    """Our name of a whole parameter that an adapter replaces; None for its matrices and biases."""
    own = name.removeprefix(PEFT).replace(".modules_to_save.", ".")
    if own.endswith(TRAINED_TOKENS):
        matrix = _whole(f"{own.removesuffix(TRAINED_TOKENS)}.weight")
        return matrix + ROWS if matrix in (EMBEDDING, OUTPUT) else None
    own = own.replace(".token_adapter.", ".").replace(".base_layer.", ".")
    if own == HEAD:
        return OUTPUT
    own = own.removeprefix(TRUNK)
    return None if MODULE.fullmatch(own.removesuffix(".bias")) else our_name(own)


def _is_copy(name: str, weights: Index) -> bool:
    """Whether a tensor of an embedding or head that PEFT saves is not the one that it loads.

    With `save_embedding_layers`, also by itself after `resize_token_embeddings`, it saves a module
    of `modules_to_save` three times: as `wte.weight`, which it loads, as
    `wte.modules_to_save.weight`, and as it was before as `wte.original_module.weight`.
    """
    loaded = re.sub(r"\.(original_module|modules_to_save)\.", ".", name)
    return loaded != name and loaded in weights


def _tokens(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """The ids of `trainable_token_indices` by our names of the matrices. Raises `ArtifactError`."""
    given = config.get("trainable_token_indices") or {}
    tokens = {}
    for module, ids in (given if isinstance(given, dict) else {"wte": given}).items():
        name = _whole(f"{module}.weight")
        fits = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
        if name not in (EMBEDDING, OUTPUT) or not fits or not ids:
            raise ArtifactError(
                f"{ADAPTER}: trainable_token_indices must be token ids, or token ids of wte and"
                f" lm_head, is {str(given)[:100]}"
            )
        tokens[name] = ids
    return tokens


def _checked(name: str, tensor: Tensor, file: str) -> Tensor:
    if tensor.dtype not in artifact.DTYPES:
        raise ArtifactError(
            f"{file}: {name} is {tensor.dtype}, must be {' or '.join(artifact.DTYPES)}"
        )
    if tensor.ndim not in (1, 2) or not tensor.size:
        raise ArtifactError(f"{file}: {name} has the shape {tensor.shape}, which no adapter's has")
    return tensor


def _check_parts(
    config: Mapping[str, Any], index: Index, module: str, called: str, file: str
) -> None:
    """Raise `ArtifactError` unless a module has the parts that the configuration calls for."""
    for option, part, theirs in (
        ("use_dora", "magnitude", "lora_magnitude_vector"),
        ("lora_bias", "up_bias", "lora_B.bias"),
    ):
        wanted, there = bool(config.get(option)), f"{module}.{part}" in index
        if wanted != there:
            raise ArtifactError(
                f"{ADAPTER} says {option} {str(wanted).lower()}, but {file}"
                f" {'has' if there else 'lacks'} {theirs} of {called}"
            )


def _check_pair(index: Index, module: str, called: str, file: str) -> int:
    """Return the rank of a module's two matrices. Raises `ArtifactError`."""
    shapes = []
    for part, theirs in (("down", "lora_A"), ("up", "lora_B")):
        if (tensor := index.get(f"{module}.{part}")) is None:
            raise ArtifactError(f"{file} lacks {theirs} of {called}")
        if tensor.ndim != 2:
            raise ArtifactError(
                f"{file}: {theirs} of {called} has the shape {tensor.shape}, must be two"
            )
        shapes.append(tensor.shape)
    down, up = shapes
    if down[0] != up[1]:
        raise ArtifactError(
            f"{file}: lora_A of {called} is {down} and lora_B {up}, of different ranks"
        )
    return down[0]
