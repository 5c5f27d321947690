"""Writes `tests/engine/pytorch_model.bin` with torch itself: the weights of `TINY` and what such
files hold beside them. In the oracle's environment (see make_golden):

    .venv-oracle/bin/python -m tests.oracle.make_torch_file
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

from engine.artifacts.config import GPT2Config
from tests.engine.hugging_face import TINY, their_weights

FILE = Path(__file__).parents[1] / "engine" / "pytorch_model.bin"


def main() -> None:
    config = GPT2Config(
        TINY["vocab"], TINY["units"], 1, TINY["heads"], 4 * TINY["units"], TINY["max_length"]
    )
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, weight in their_weights(config, TINY["seed"], "float32"):
        # A Conv1D matrix is a view with other strides here, as after `weight.t()`.
        state[name] = torch.from_numpy(weight.copy())
        if name.endswith("c_fc.weight"):
            state[name] = torch.from_numpy(weight.T.copy()).t()
    state["lm_head.weight"] = state["transformer.wte.weight"]  # one storage, two names
    state["transformer.h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 8, 8, dtype=torch.uint8))
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    state["transformer.ln_f.weight"] = torch.nn.Parameter(state["transformer.ln_f.weight"])
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    torch.save(state, FILE)


if __name__ == "__main__":
    main()
