"""Measured: the engine with its defaults on what people send: samples, prompts of
all lengths that come and go, long ones.

Prompts are new in each round, so that nothing of them is kept from the one before.
"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.engine.request import Request
from benchmarks.worker import Channel
from engine.registry import Engine
from engine.settings import Settings

ROWS = 8
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 50}


def main() -> None:
    backend, precision, folder = sys.argv[1:]
    engine = Engine(Settings(backend=backend, precision=precision))
    config = engine.load("m", folder).config
    seeds = itertools.count()

    def prompt(length: int) -> list[int]:
        rng = np.random.default_rng(next(seeds))
        ids: list[int] = rng.integers(4, config.vocab_size, length).tolist()
        return ids

    def tokens_per_s(work: list[tuple[int, int]], **options: Any) -> float:
        """Of prompts and answers of these lengths, for `ROWS` clients that take them in turn."""

        def answered(ids: list[int], new: int) -> int:
            return Request(engine, ids, new, **options).wait().tokens

        prompts = [prompt(length) for length, _ in work]
        began = time.perf_counter()
        with ThreadPoolExecutor(ROWS) as clients:
            tokens = sum(clients.map(answered, prompts, [new for _, new in work]))
        return tokens / (time.perf_counter() - began)

    def measure(prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        equal = [(prompt_tokens, new_tokens)] * ROWS
        longest = config.max_length * 2 // 5  # of 1,024 some 400
        lengths = np.linspace(5, longest, 2 * ROWS).astype(int).tolist()
        news = np.linspace(new_tokens // 4, new_tokens, 2 * ROWS).astype(int).tolist()
        order = np.random.default_rng(0).permutation(2 * ROWS).tolist()
        ragged = [(lengths[i], news[-i]) for i in order]
        long = [prompt(length) for length in (config.max_length // 2, config.max_length - 24)]
        return {
            "greedy_tokens_per_s": tokens_per_s(equal),
            "sampled_tokens_per_s": tokens_per_s(equal, **SAMPLED, seed=1),
            "ragged_tokens_per_s": tokens_per_s(ragged),
            "long_prompts_s": {len(ids): Request(engine, ids, 1).wait().first_s for ids in long},
        }

    tokens_per_s([(16, 2)] * ROWS, **SAMPLED)  # to warm up
    Channel().serve({}, {"measure": measure})
    engine.close()


if __name__ == "__main__":
    main()
