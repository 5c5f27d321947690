"""The `logits` command of contenders, with which their errors are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def logits_command(logits_after: Callable[[Sequence[int], int], Any]) -> Callable[..., None]:
    """Return the command, which saves the logits (texts, T, V) that predict each text.

    `logits_after(ids, count)` returns the logits (count, V) after each of the last `count` ids.
    """

    def command(prompts: list[list[int]], texts: list[list[int]], file: str) -> None:
        pairs = zip(prompts, texts, strict=True)
        np.save(file, np.stack([logits_after([*p, *t[:-1]], len(t)) for p, t in pairs]))

    return command
