"""Contender: Hugging Face transformers in fp32. Runs in the environment of the peers.

The loop is `generate`'s without its generality: the model itself with its own K/V cache, logits of
the last position only.
"""

from __future__ import annotations

import torch
import transformers

from benchmarks.worker import Clock, Started, generation


def start(folder: str, threads: str) -> Started:
    torch.set_num_threads(int(threads))
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def generate(prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        ids, past = torch.tensor(prompts), None
        made = []
        for _ in range(new_tokens):
            out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            ids = out.logits[:, -1].argmax(dim=-1, keepdim=True)  # (B, 1)
            made.append(ids[:, 0].tolist())
            clock.step()
        return [list(row) for row in zip(*made, strict=True)]

    about = {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    return about, {"generate": generation(generate)}
