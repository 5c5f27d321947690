"""Greedy generation by transformers, in the oracle's environment."""

from __future__ import annotations

from typing import Any

import torch


def greedy(model: Any, ids: Any, count: int, **options: Any) -> tuple[list[int], list[float]]:
    """The new ids after `ids` (1, T), and each one's margin: best less second best logit."""
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=3,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    best = torch.stack([scores[0].topk(2).values for scores in made.scores])  # (N, 2)
    return made.sequences[0, ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).tolist()
