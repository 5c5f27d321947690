"""Writes logits and continuations of Hugging Face's GPT2LMHeadModel as `.npz`.

Without arguments the goldens beside this file, in the oracle's environment; with a folder the one
of KoGPT2's own shape, into it:

    . scripts/setup.sh; ensure_group "$PWD/.venv-oracle" oracle
    .venv-oracle/bin/python -m tests.oracle.make_golden [FOLDER]

Each file holds `ids` (T,), `logits` (T, V), the greedy continuation `greedy` (N,) with its
`margins` (N,) between the best and the second best logit, and the same with a repetition penalty
as `penalized` (N,) and `penalized_margins` (N,).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from engine.artifacts import hugging_face
from tests.oracle.generate import greedy
from tests.oracle.weights import CASES, WHOLE, Case

HERE = Path(__file__).parent
REPETITION_PENALTY = 1.5


def build(case: Case) -> GPT2LMHeadModel:
    """The case's weights in transformers' model."""
    c = case.config
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.max_length,
            n_embd=c.units,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            n_inner=c.hidden_size,
            activation_function=c.activation,
            layer_norm_epsilon=c.layer_norm_eps,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
    ).eval()
    theirs = dict(model.named_parameters())
    names = {ours: rest for ours, *rest in hugging_face.names(c)}
    with torch.no_grad():
        for name, weight in case.weights():
            their_name, transposed = names[name]
            given = torch.from_numpy(weight.T if transposed else weight)
            target = theirs.pop(their_name)
            assert target.shape == given.shape, (name, target.shape, given.shape)
            target.copy_(given)
    assert not theirs, f"left random: {list(theirs)}"
    return model


def answer(case: Case) -> dict[str, Any]:
    model = build(case)
    ids = torch.from_numpy(case.ids)[None, :]
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
    found = {"ids": case.ids, "logits": logits}
    found["greedy"], found["margins"] = greedy(model, ids, case.new_tokens)
    found["penalized"], found["penalized_margins"] = greedy(
        model, ids, case.new_tokens, repetition_penalty=REPETITION_PENALTY
    )
    return found


def main() -> None:
    cases, folder = ([WHOLE], Path(sys.argv[1])) if sys.argv[1:] else (CASES, HERE)
    for case in cases:
        np.savez_compressed(folder / f"{case.name}.npz", **answer(case))


if __name__ == "__main__":
    main()
