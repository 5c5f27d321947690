"""Measured: the engine with its scheduler, in one process, on several models or on one."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from benchmarks.worker import Channel
from common.parameters import Parameters
from engine.engine import Engine
from engine.http.answer import Answer
from engine.settings import Settings


def main() -> None:
    backend, precision, *folders = sys.argv[1:]
    engine = Engine(Settings(backend=backend, precision=precision))
    for i, folder in enumerate(folders):
        engine.load(str(i), folder)

    def ask(requests: list[tuple[int, str]], new_tokens: int) -> int:
        """All at once; returns how many tokens came back."""
        waiting = []
        for model, text in requests:
            done = threading.Event()
            answer = Answer(1, done.set)
            parameters = Parameters(max_new_tokens=new_tokens)
            engine.submit(str(model), text, parameters, answer.emit, timeout_s=120, stream=False)
            waiting.append((done, answer))
        for done, _ in waiting:
            done.wait()
        return sum(answer.result()["completions"][0]["tokens"] for _, answer in waiting)

    def timed(requests: list[tuple[int, str]], new_tokens: int, times: int = 1) -> float:
        """Tokens per second, after a short warm-up."""
        ask(requests, 2)
        began = time.perf_counter()
        tokens = sum(ask(requests, new_tokens) for _ in range(times))
        return tokens / (time.perf_counter() - began)

    def measure(texts: list[str], new_tokens: int) -> dict[str, Any]:
        """Tokens per second of one model alone, of all in turns, and of a batch on one."""
        return {
            "alone_tokens_per_s": timed([(0, texts[0])], new_tokens, times=4),
            "turns_tokens_per_s": timed([(i, texts[0]) for i in range(len(folders))], new_tokens),
            "batch_tokens_per_s": timed([(0, text) for text in texts], new_tokens),
        }

    Channel().serve({"models": len(folders)}, {"measure": measure})
    engine.close()


if __name__ == "__main__":
    main()
