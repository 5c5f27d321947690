"""LoRA adapters as PEFT's `save_pretrained` writes them: `adapter_config.json`, and the matrices in
`adapter_model.safetensors` or `adapter_model.bin`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from common.model_files import ADAPTER
from engine.artifacts.artifact import (
    ATTENTION_OUT,
    DTYPES,
    FFN_HIDDEN,
    FFN_OUT,
    QKV,
    MappedWeights,
    list_files,
)
from engine.artifacts.config import GPT2Config
from engine.artifacts.files import read_json
from engine.artifacts.generation_config import Generation, read_generation
from engine.artifacts.tensor_index import Index, Tensor

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# The linear layers of a GPT-2 block, as transformers names them, and our names of them.
PRODUCTS = {
    "attn.c_attn": "qkv",
    "attn.c_proj": "attention_out",
    "mlp.c_fc": "ffn_hidden",
    "mlp.c_proj": "ffn_out",
}
BASE_NAMES = {
    "qkv": QKV,
    "attention_out": ATTENTION_OUT,
    "ffn_hidden": FFN_HIDDEN,
    "ffn_out": FFN_OUT,
}
PARTS = {"lora_A.weight": "down", "lora_B.weight": "up", "lora_B.bias": "up_bias", "bias": "bias"}
MODULE = re.compile(rf"(?:.*\.)?h\.(\d{{1,4}})\.({'|'.join(map(re.escape, PRODUCTS))})")
MERGE = "merge it into its base (peft: merge_and_unload, then save_pretrained)"
# What a row of the base's pass cannot have, with the values that change nothing.
NOT_SHARED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "use_bdlora": (),
    "kasa_config": (),
    "megatron_config": ({},),
}
# Ways to begin that change the base's own weights, too.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter(MappedWeights):
    """A checked adapter.

    `index` has the matrices as `3.qkv.down` (rank, inputs), `3.qkv.up` (outputs, rank) and, where
    biases were trained, `3.qkv.bias` (outputs,), the layer's new bias, or `3.qkv.up_bias`, which is
    scaled and added. `scales` has what `up` is multiplied by, as `3.qkv`.
    """

    path: Path
    base: str  # the name or path of the model that it was trained on
    index: Index
    scales: Mapping[str, float]
    generation: Generation = field(default_factory=Generation)
    content: str = ""

    def check_fits(self, config: GPT2Config) -> None:
        """Raises `ArtifactError` unless the matrices have the shapes of a base's layers."""
        c = config
        sizes = {
            "qkv": (3 * c.units, c.units),
            "attention_out": (c.units, c.units),
            "ffn_hidden": (c.hidden_size, c.units),
            "ffn_out": (c.units, c.hidden_size),
        }
        for name, tensor in self.index.items():
            layer, product, part = name.split(".")
            outputs, inputs = sizes[product]
            if int(layer) >= c.num_layers:
                raise ArtifactError(
                    f"the adapter {self.path.name} has matrices for layer {layer}, but its base has"
                    f" {c.num_layers} layers (from 0)"
                )
            rank = self.index[f"{layer}.{product}.down"].shape[0]
            expected = {"down": (rank, inputs), "up": (outputs, rank)}.get(part, (outputs,))
            if tensor.shape != expected:
                raise ArtifactError(
                    f"the adapter {self.path.name} does not fit its base: {part} of {product} in"
                    f" layer {layer} is {tensor.shape}, must be {expected}"
                )
            if rank > c.units:
                raise ArtifactError(
                    f"the adapter {self.path.name} has rank {rank} in layer {layer}, more than the"
                    f" {c.units} units of its base: serve a whole model instead ({MERGE})"
                )


def read(path: str | Path) -> Adapter:
    """Checks the adapter in a folder. Raises `ArtifactError` that says what is wrong with it."""
    folder = Path(path)
    config = read_json(folder / ADAPTER)
    _check_kind(config)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str):
        base = ""
    weights, file = _read_weights(folder)
    index: Index = {}
    called: dict[str, str] = {}  # what the modules are to PEFT
    for name, tensor in weights.items():
        module, part, its_name = _place(name, file)
        index[f"{module}.{part}"] = _checked(name, tensor, file)
        called[module] = its_name
    if not index:
        raise ArtifactError(f"{file} holds no matrices of an adapter")
    for module in sorted(called):
        _check_pair(index, module, file)
    scales = {
        module: _scale(config, called[module], index[f"{module}.down"].shape[0])
        for module in sorted(called)
    }
    return Adapter(folder, base, index, scales, read_generation(folder))


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ArtifactError(
            f"{ADAPTER}: peft_type is {kind!r}, must be 'LORA'; where peft can, {MERGE}"
        )
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise ArtifactError(f"{ADAPTER}: task_type is {task!r}, must be 'CAUSAL_LM'")
    for name, harmless in NOT_SHARED.items():
        value = config.get(name)
        if value is not None and value not in harmless:
            raise ArtifactError(
                f"{ADAPTER}: {name} is {value!r}, which cannot be served beside other adapters"
                f" of its base: {MERGE}"
            )
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE):
        raise ArtifactError(
            f"{ADAPTER}: init_lora_weights is {begun!r}, which changes the base, too: save it"
            f" with path_initial_model_for_weight_conversion, or {MERGE}"
        )
    bias = config.get("bias", "none")
    if bias not in ("none", "lora_only"):
        raise ArtifactError(
            f"{ADAPTER}: bias is {bias!r}, must be 'none' or 'lora_only'; else {MERGE}"
        )


def _read_weights(folder: Path) -> tuple[Index, str]:
    from engine.artifacts.read_safetensors import index_safetensors
    from engine.artifacts.read_torch import index_torch

    for name, index_file in zip(WEIGHT_FILES, (index_safetensors, index_torch), strict=True):
        if (folder / name).exists():
            return index_file(folder / name), name
    raise ArtifactError(
        f"{folder.name} holds {ADAPTER}, but no {WEIGHT_FILES[0]} beside it"
        f" (found: {list_files(folder)})"
    )


def _place(name: str, file: str) -> tuple[str, str, str]:
    """The module, the part and PEFT's name of the module: of
    `base_model.model.transformer.h.3.attn.c_attn.lora_A.weight`, for example, `3.qkv`, `down` and
    `transformer.h.3.attn.c_attn`."""
    for part, ours in PARTS.items():
        where = name.removesuffix(f".{part}").removesuffix(".base_layer")
        module = MODULE.fullmatch(where)
        if name.endswith(f".{part}") and module:
            called = where.removeprefix("base_model.model.")
            return f"{int(module[1])}.{PRODUCTS[module[2]]}", ours, called
    raise ArtifactError(
        f"{file} holds {name}, which is no LoRA matrix of {', '.join(PRODUCTS)}: {MERGE}"
    )


def _checked(name: str, tensor: Tensor, file: str) -> Tensor:
    if tensor.dtype not in DTYPES:
        raise ArtifactError(
            f"{file}: {name} is {tensor.dtype}, must be float16, bfloat16 or float32"
        )
    if tensor.ndim != (1 if name.endswith("bias") else 2) or not tensor.size:
        raise ArtifactError(f"{file}: {name} has the shape {tensor.shape}, which no adapter's has")
    return tensor


def _check_pair(index: Index, module: str, file: str) -> None:
    layer, product = module.split(".")
    called = f"h.{layer}.{next(name for name, ours in PRODUCTS.items() if ours == product)}"
    for part, theirs in (("down", "lora_A"), ("up", "lora_B")):
        if f"{module}.{part}" not in index:
            raise ArtifactError(f"{file} lacks {theirs} of {called}")
    down, up = index[f"{module}.down"].shape, index[f"{module}.up"].shape
    if down[0] != up[1]:
        raise ArtifactError(
            f"{file}: lora_A of {called} is {down} and lora_B {up}, of different ranks"
        )


def _scale(config: Mapping[str, Any], called: str, rank: int) -> float:
    """What an adapter's product is multiplied by, as PEFT's `LoraLayer.update_layer` has it.

    Patterns see a module's name in what was given to PEFT: not always with `transformer.`.
    """
    said = _pattern(config, "rank_pattern", called, config.get("r", 8))
    if said != rank:
        raise ArtifactError(
            f"{ADAPTER} says rank {said!r} for {called}, but its matrices have {rank}"
        )
    alpha = _pattern(config, "alpha_pattern", called, config.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ArtifactError(f"{ADAPTER}: lora_alpha is {alpha!r}, must be a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """A module's entry in `rank_pattern` or `alpha_pattern`, whose keys are regular expressions."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise ArtifactError(f"{ADAPTER}: {name} must be an object")
    for key, value in patterns.items():
        try:
            found = re.match(rf"(.*\.)?({key})$", module)
        except (re.error, RecursionError, OverflowError):
            raise ArtifactError(f"{ADAPTER}: {name} has the key {key[:100]!r}") from None
        if found:
            return value
    return default
