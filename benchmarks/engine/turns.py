"""Measured: the engine with its scheduler, in one process, on several models or on one."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.engine.request import Request
from benchmarks.worker import Channel
from engine.engine import Engine
from engine.settings import Settings


def main() -> None:
    backend, precision, *folders = sys.argv[1:]
    engine = Engine(Settings(backend=backend, precision=precision))
    for i, folder in enumerate(folders):
        engine.load(str(i), folder)

    def ask(requests: list[tuple[int, list[int]]], new_tokens: int) -> int:
        """All at once; returns how many tokens came back."""
        running = [Request(engine, ids, new_tokens, str(model)) for model, ids in requests]
        return sum(request.wait().tokens for request in running)

    def timed(requests: list[tuple[int, list[int]]], new_tokens: int, times: int = 1) -> float:
        """Tokens per second, after a short warm-up."""
        ask(requests, 2)
        began = time.perf_counter()
        tokens = sum(ask(requests, new_tokens) for _ in range(times))
        return tokens / (time.perf_counter() - began)

    def measure(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Tokens per second of one model alone, of all in turns, and of a batch on one."""
        return {
            "alone_tokens_per_s": timed([(0, prompts[0])], new_tokens, times=4),
            "turns_tokens_per_s": timed([(i, prompts[0]) for i in range(len(folders))], new_tokens),
            "batch_tokens_per_s": timed([(0, ids) for ids in prompts], new_tokens),
        }

    Channel().serve({"models": len(folders)}, {"measure": measure})
    engine.close()


if __name__ == "__main__":
    main()
