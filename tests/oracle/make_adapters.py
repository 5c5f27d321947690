"""Has PEFT make and save adapters, and answer with adapters on their base.

In the oracle's environment (see make_golden):

    .venv-oracle/bin/python -m tests.oracle.make_adapters PLAN.json

The plan names the folder of the `base`, the `prompts` and a `text`, and by name what to `make`,
which adapters to `route` to and to `merge`, and what to `ask`. Beside it come `answers.json`, by
name a list of `new` ids and their `margins` for each prompt, and the `ids` of the text; and
`logprobs.npz`, with the log-probabilities (T, V) after each token of the text.
"""

from __future__ import annotations

import json
import sys
import warnings
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.oracle.generate import greedy

NEW_TOKENS = 8
STRENGTH = 0.12  # of what an adapter adds to a weight; a base's own are about 0.2


def make(base: Path, path: Path, options: dict[str, Any]) -> None:
    """Saves an adapter with random matrices.

    config: what PEFT's class of configurations, `kind`, is given
    dtype: what the matrices are saved as
    vocabulary: the size to which the model is resized before; the tokenizer is saved, too
    name: of the adapter in the model
    beside: by name, configurations of further adapters of the same model
    sum: the sum of all of them is saved in their place
    over: what PEFT is given: the model, or "transformer", which is a part of it; with "mixin"
        transformers' own model takes and saves the adapter
    converted: one that began with a part of the base is saved as one of the base as it was
    save: what `save_pretrained` is given
    """
    torch.manual_seed(options["seed"])
    over = options.get("over")
    dtype = getattr(torch, options.get("dtype", "float32"))
    model = load(base, dtype, AutoModelForCausalLM)
    if vocabulary := options.get("vocabulary"):
        model.resize_token_embeddings(vocabulary)
        AutoTokenizer.from_pretrained(base).save_pretrained(path)
    config = getattr(peft, options.get("kind", "LoraConfig"))(**options["config"])
    name = options.get("name", "default")
    if over == "mixin":
        model.add_adapter(config)
        disturb(model)
        model.save_pretrained(path)
        return
    adapted = peft.get_peft_model(
        model.transformer if over == "transformer" else model,
        config,
        adapter_name=name,
        autocast_adapter_dtype=False,
    )
    for other, its_config in options.get("beside", {}).items():
        adapted.add_adapter(other, peft.LoraConfig(**its_config), autocast_adapter_dtype=False)
    save = dict(options.get("save", {}))
    if options.get("converted"):
        begun, config.init_lora_weights = config.init_lora_weights, True
        initial = path.parent / f"initial-{path.name}"
        adapted.save_pretrained(initial)
        config.init_lora_weights = begun
        save["path_initial_model_for_weight_conversion"] = str(initial)
    if config.peft_type == "LORA":
        disturb(adapted)
    if options.get("sum"):
        names = [name, *options["beside"]]
        adapted.add_weighted_adapter(names, [1.0] * len(names), "sum", combination_type="cat")
        save["selected_adapters"] = ["sum"]
    adapted.save_pretrained(path, **save)


@torch.no_grad()
def disturb(adapted: Any) -> None:
    """Gives an adapter numbers that change the text, as if it had been trained."""
    for module in adapted.modules():
        for name in module.lora_A if isinstance(module, LoraLayer) else ():
            down, up = module.lora_A[name].weight, module.lora_B[name].weight
            free, other = (up, down) if down.any() else (down, up)
            size = STRENGTH / (module.scaling[name] * module.r[name] ** 0.5 * other.float().std())
            free += (torch.randn(free.shape) * size).to(free.dtype)
            if module.lora_B[name].bias is not None:
                bias = module.lora_B[name].bias
                bias += (torch.randn(bias.shape) * 0.4 / module.scaling[name]).to(bias.dtype)
    for name, weight in adapted.named_parameters():
        if weight.requires_grad and "trainable_tokens" in name:
            weight += torch.randn(weight.shape).to(weight.dtype)
        elif weight.requires_grad and "lora_magnitude_vector" in name:
            weight *= (1 + 0.2 * torch.randn(weight.shape)).to(weight.dtype)
        elif weight.requires_grad and "lora_" not in name:  # biases, and modules that are saved
            size = 0.4 if weight.ndim == 1 else 0.2 * float(weight.float().std())
            weight += (torch.randn(weight.shape) * size).to(weight.dtype)


def route(base: Path, path: Path, adapters: list[str]) -> None:
    """Saves a router (Arrow), which chooses among adapters by the token. PEFT gives it matrices,
    too, which nothing uses."""
    arrow = peft.ArrowConfig(top_k=1)
    peft.create_arrow_model(load(base), adapters, arrow).save_pretrained(path)


def save_whole(model: Any, base: Path, path: Path) -> None:
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(base).save_pretrained(path)


@cache
def loaded(path: Path, dtype: Any, kind: Any) -> Any:
    return kind.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def load(path: Path, dtype: Any = torch.float32, kind: Any = AutoModelForCausalLM) -> Any:
    """A model of its own; reading one of a path anew takes ten times as long as a copy."""
    return deepcopy(loaded(path, dtype, kind))


def with_adapter(model: Any, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return peft.PeftModel.from_pretrained(model, path)


def opened(base: Path, path: Path, kind: str, vocabulary: int) -> Any:
    """A "whole" model, or the base with an adapter of it or of its "transformer".

    vocabulary: the size that the adapter has for it; 0 if that is the base's
    """
    if kind == "whole":
        return load(path)
    model = load(base)
    if vocabulary:
        model.resize_token_embeddings(vocabulary)
    if kind != "transformer":
        return with_adapter(model, path).eval()
    with_adapter(model.transformer, path)  # puts it there
    return model.eval()


def answer(model: Any, prompts: list[Any], text: Any) -> tuple[dict[str, Any], Any]:
    """An answer, and the log-probabilities; prompts and text are ids (1, T)."""
    new, margins = zip(*(greedy(model, ids, NEW_TOKENS) for ids in prompts), strict=True)
    with torch.no_grad():
        logprobs = model(input_ids=text).logits[0].log_softmax(-1).numpy()
    return {"ids": text[0].tolist(), "new": new, "margins": margins}, logprobs


def main() -> None:
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    plan = json.loads(file.read_text(encoding="utf-8"))
    base = Path(plan["base"])
    for options in plan["make"].values():
        make(base, Path(options["path"]), options)
    for path, adapters in plan["route"].values():
        route(base, Path(path), adapters)
    for path, target in plan["merge"].values():
        save_whole(with_adapter(load(base), Path(path)).merge_and_unload(), base, Path(target))
    tokenizer = AutoTokenizer.from_pretrained(base)
    *prompts, text = (
        tokenizer(each, return_tensors="pt").input_ids for each in (*plan["prompts"], plan["text"])
    )
    answers, logprobs = {}, {}
    for name, (path, *how) in plan["ask"].items():
        answers[name], logprobs[name] = answer(opened(base, Path(path), *how), prompts, text)
    said = json.dumps(answers, ensure_ascii=False)
    file.with_name("answers.json").write_text(said, encoding="utf-8")
    np.savez(file.with_name("logprobs.npz"), **logprobs)


if __name__ == "__main__":
    main()
