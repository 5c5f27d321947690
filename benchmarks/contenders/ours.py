"""Contender: one of our backends, driven as the engine drives it, without the engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.contenders.logits import logits_command
from benchmarks.worker import Clock, Started, generation
from command.logits import logits_after
from engine import backends
from engine.artifacts.open import open_artifact
from engine.backends.interface import BackendModel, Piece
from engine.native.prepared import layout


def generate(
    model: BackendModel, prompts: Sequence[list[int]], new_tokens: int, clock: Clock
) -> list[list[int]]:
    """Decode all prompts greedily in one batch; call `clock.step` after the pass of each token."""
    rows = [model.open_row() for _ in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    pieces = [Piece(row, ids) for row, ids in zip(rows, prompts, strict=True)]
    for _ in range(new_tokens):
        logits = model.run(pieces)
        for ids, token in zip(made, logits.argmax(axis=1).tolist(), strict=True):
            ids.append(token)
        pieces = [Piece(row, ids[-1:]) for row, ids in zip(rows, made, strict=True)]
        clock.step()
    for row in rows:
        model.close_row(row)
    return made


def start(folder: str, backend: str, precision: str) -> Started:
    artifact = open_artifact(folder)
    model = backends.load(artifact, backend, precision)
    # A step reads only single rows of the position embeddings.
    unread = [e.num_bytes for e in layout(artifact.config, precision) if e.name == "positions"]
    about = {
        "version": f"{backend} {precision}",
        "weight_bytes": model.weight_bytes,
        "step_bytes": model.weight_bytes - sum(unread),
    }
    logits = logits_command(partial(logits_after, model))
    return about, {"generate": generation(partial(generate, model)), "logits": logits}
