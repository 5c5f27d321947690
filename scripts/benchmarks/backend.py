"""Contender: one of our backends, driven as the engine drives it, without the engine around it."""

from __future__ import annotations

import sys
from importlib import metadata

import numpy as np

from engine import backends
from engine.artifacts import open_artifact
from scripts.benchmarks.worker import Channel, Clock, generation


def main() -> None:
    folder, backend, precision = sys.argv[1:]
    model = backends.load(open_artifact(folder), backend, precision)

    def generate(prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        made: list[list[int]] = [[] for _ in prompts]
        for ids, prompt in zip(made, prompts, strict=True):
            logits = model.extend(model.add_row(), np.array(prompt))
            ids.append(int(logits.argmax()))
        clock.step()
        for _ in range(new_tokens - 1):
            rows = model.decode(np.array([ids[-1] for ids in made]))
            for ids, token in zip(made, rows.argmax(axis=1).tolist(), strict=True):
                ids.append(token)
            clock.step()
        for _ in prompts:
            model.remove_last_row()
        return made

    about = {
        "version": f"{backend} {metadata.version(backend)}",
        "weight_bytes": model.weight_bytes,
    }
    Channel().serve(about, {"generate": generation(generate)})


if __name__ == "__main__":
    main()
