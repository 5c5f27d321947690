"""Measured: the engine on prompts that begin alike, with what it keeps of them and without.

A chat of eight turns that sends its history again each time, and eight answers to one prompt.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy as np

from benchmarks.engine.request import Request
from benchmarks.worker import Channel
from engine.registry import Engine
from engine.settings import Settings

TURNS = 8
ANSWERS = 8
PAUSE_S = 0.3  # less than anybody takes to read an answer and write the next line


def main() -> None:
    backend, precision, folder = sys.argv[1:]
    engines = {
        name: Engine(Settings(backend=backend, precision=precision, prefix_cache_mib=mib))
        for name, mib in (("with", 512), ("without", 0))
    }
    config = {name: engine.load("m", folder).config for name, engine in engines.items()}["with"]
    history, answer, line = (config.max_length // part for part in (2, 32, 64))
    seeds = itertools.count()

    def prompt(length: int) -> list[int]:
        rng = np.random.default_rng(next(seeds))
        ids: list[int] = rng.integers(4, config.vocab_size, length).tolist()
        return ids

    def chat(engine: Engine, pause_s: float) -> list[float]:
        """Seconds to the first token of each turn; the second has `history` tokens before it."""
        said, found = prompt(history - answer), []
        for _ in range(TURNS):
            request = Request(engine, said, answer).wait()
            found.append(request.first_s)
            said = said + request.ids + prompt(line)
            time.sleep(pause_s)
        return found

    def measure() -> dict[str, Any]:
        found: dict[str, Any] = {"history": history, "answer": answer, "line": line}
        for name, engine in engines.items():
            found[name] = {"chat_s": chat(engine, PAUSE_S), "chat_at_once_s": chat(engine, 0)}
            for length in (16, history // 4):
                one = Request(engine, prompt(length), 2).wait()
                several = Request(engine, prompt(length), 2, num_return_sequences=ANSWERS).wait()
                found[name][f"answers_{length}"] = {
                    "one_s": one.first_s,
                    "first_s": several.first_s,
                    "all_s": several.all_begun_s,
                }
        return found

    for engine in engines.values():
        chat(engine, 0)  # to warm up, and so that the engine knows that answers come back
    Channel().serve({}, {"measure": measure})
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
