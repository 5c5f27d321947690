"""The configuration of a LoRA adapter, `adapter_config.json`, as PEFT applies it."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from common.errors import ArtifactError
from common.model_files import ADAPTER
from engine.artifacts.hugging_face import MERGE

ALL_LINEAR = "all-linear"
# The modules with the heads of adapters that classify, by their `task_type`.
CLASSIFIERS = {"SEQ_CLS": "score", "TOKEN_CLS": "classifier"}
# CPU time for all patterns of a configuration, which take microseconds; a pattern that backtracks
# takes hours.
PATTERNS_CPU_S = 1.0
# Options that are not supported, with the values that have no effect.
NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "use_qalora": (False,),
    **dict.fromkeys(("layer_replication", "target_parameters", "alora_invocation_tokens"), ([],)),
    **dict.fromkeys(("arrow_config", "use_bdlora", "kasa_config"), ()),
    "megatron_config": ({},),
}
# Initializations that also change the weights of the base.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ArtifactError(
            f"{ADAPTER}: peft_type is {kind!r}, must be 'LORA'; where peft can, {MERGE}"
        )
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM", *CLASSIFIERS):
        known = ", ".join(["CAUSAL_LM", *CLASSIFIERS])
        raise ArtifactError(f"{ADAPTER}: task_type is {task!r}, must be one of {known}")
    for name, harmless in NOT_DONE.items():
        value = config.get(name)
        if value is not None and value not in harmless:
            raise ArtifactError(f"{ADAPTER}: {name} is {value!r}, which is not supported: {MERGE}")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE):
        raise ArtifactError(
            f"{ADAPTER}: init_lora_weights is {begun!r}, which changes the base, too: save it"
            f" with path_initial_model_for_weight_conversion, or {MERGE}"
        )


def check_targeted(config: Mapping[str, Any], called: str, file: str) -> None:
    """Raise `ArtifactError` for a module that PEFT gives no matrices, whatever the file holds.

    As in PEFT's `check_target_module_exists`, to which no target modules are those of GPT-2.
    """
    targets = config.get("target_modules")
    everything = isinstance(targets, str) and targets.lower() == ALL_LINEAR
    saved, form = "modules_to_save", r"(^|.*\.){}($|\..*)"
    if not everything and not _is_in(config, "target_modules", called, ["c_attn"]):
        reason = "is not in target_modules"
    elif _is_in(config, "exclude_modules", called):
        reason = "is in exclude_modules"
    elif any(_match(saved, name, called, form) for name in _names(config, saved)):
        reason = "is in modules_to_save"
    elif not (
        isinstance(targets, str) or called in (targets or ()) or _is_layer_in(config, called)
    ):
        reason = "is not in layers_to_transform"
    else:
        return
    raise ArtifactError(f"{file} has matrices of {called}, which {reason} of {ADAPTER}")


def _is_in(config: Mapping[str, Any], name: str, called: str, default: Any = ()) -> bool:
    """Whether a module is in an option: an expression, or a list of ends of names."""
    if isinstance(pattern := config.get(name), str):
        return _match(name, pattern, called, match=re.fullmatch) is not None
    modules = _names(config, name) or default
    return any(f".{called}".endswith(f".{module}") for module in modules)


def _is_layer_in(config: Mapping[str, Any], called: str) -> bool:
    """Whether `layers_to_transform` has a module's layer, which `layers_pattern` helps to find."""
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    form = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
    for name in _names(config, "layers_pattern") or [r"[^.]*"]:
        if layer := _match("layers_pattern", name, called, form):
            return int(layer["idx"]) in (layers if isinstance(layers, list) else [layers])
    return False


def _names(config: Mapping[str, Any], name: str) -> list[str]:
    """Return an option that is a name or a list of names. Raises `ArtifactError`."""
    value = config.get(name) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ArtifactError(f"{ADAPTER}: {name} must be a list of names, is {str(value)[:100]}")
    return value


def scale(config: Mapping[str, Any], called: str, rank: int) -> float:
    """The factor of an adapter's product, as in PEFT's `LoraLayer.update_layer`.

    Patterns match a module's name in the model that PEFT was given, with or without `transformer.`.
    """
    expected = _pattern(config, "rank_pattern", called, config.get("r", 8))
    if expected != rank:
        raise ArtifactError(
            f"{ADAPTER} says rank {expected!r} for {called}, but its matrices have {rank}"
        )
    alpha = _pattern(config, "alpha_pattern", called, config.get("lora_alpha", 8))
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not abs(alpha) <= sys.float_info.max:  # NaN is not
        raise ArtifactError(f"{ADAPTER}: lora_alpha is {str(alpha)[:100]}, must be a finite number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """A module's entry in `rank_pattern` or `alpha_pattern`, whose keys are regular expressions."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise ArtifactError(f"{ADAPTER}: {name} must be an object")
    for key, value in patterns.items():
        if _match(name, key, module, r"(.*\.)?({})$"):
            return value
    return default


def _match(
    option: str,
    given: str,
    called: str,
    form: str = "{}",
    match: Callable[..., re.Match[str] | None] = re.match,
) -> re.Match[str] | None:
    """Match a module's name with an expression, put into `form`. Raises `ArtifactError`."""
    try:
        return match(form.replace("{}", given), called)
    except (re.error, RecursionError, OverflowError):
        raise ArtifactError(f"{ADAPTER}: {option} has the key {given[:100]!r}") from None


@contextmanager
def patterns_limit() -> Iterator[None]:
    """Raise `ArtifactError` when matching a configuration's expressions takes too long.

    Only in the main thread, where sandboxes read: signals interrupt the backtracking of `re` there.
    """

    def stop(number: int, frame: object) -> None:
        raise ArtifactError(f"{ADAPTER}: its patterns take more than {PATTERNS_CPU_S:g} s of CPU")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATTERNS_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
