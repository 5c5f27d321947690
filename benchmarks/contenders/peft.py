"""Contender: transformers with PEFT's adapters in fp32. Runs in the environment of the peers.

Rows of different adapters share a batch (`adapter_names`). PEFT has no server: batches of as many
rows as there are clients begin and end together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from benchmarks.worker import Started


def start(base: str, threads: str, *folders: str) -> Started:
    torch.set_num_threads(int(threads))
    model: Any = transformers.GPT2LMHeadModel.from_pretrained(base)
    for folder in folders:
        if isinstance(model, peft.PeftModel):
            model.load_adapter(folder, Path(folder).name)
        else:
            model = peft.PeftModel.from_pretrained(model, folder, Path(folder).name)
    model.eval()

    def generate(ids: list[int], rows: int, new_tokens: int, **more: Any) -> Any:
        """Return the new ids (B, N) and the time of the first step's end."""
        first: list[float] = []

        def on_step(*_: Any) -> torch.Tensor:
            first.append(time.perf_counter())
            return torch.zeros(rows, dtype=torch.bool)

        prompt = torch.tensor([ids] * rows)
        made = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=1,
            stopping_criteria=transformers.StoppingCriteriaList([on_step]),
            **more,
        )
        return made[:, len(ids) :], first[0]

    def alone(name: str, ids: list[int], new_tokens: int) -> list[int]:
        """Return the new ids of one adapter in a batch of its own."""
        model.set_adapter(name)
        results: list[int] = generate(ids, 1, new_tokens)[0][0].tolist()
        return results

    def trace(
        names: Sequence[str], ids: list[int], rows: int, new_tokens: int, limit_s: float
    ) -> dict[str, Any]:
        """Run the batches of the trace that begin within `limit_s` seconds."""
        began, first_s, made = time.perf_counter(), [], []
        for at in range(0, len(names), rows):
            batch, now = [*names[at : at + rows]], time.perf_counter()
            if now - began > limit_s:
                break
            results, first = generate(ids, len(batch), new_tokens, adapter_names=batch)
            first_s += [first - now] * len(batch)
            made += results.tolist()
        return {"seconds": time.perf_counter() - began, "first_s": first_s, "ids": made}

    about = {"version": f"peft {peft.__version__}, transformers {transformers.__version__}"}
    return about, {"alone": alone, "trace": trace}
