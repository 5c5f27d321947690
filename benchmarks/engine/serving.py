"""Measured: tokens over HTTP, and what the way of a request costs."""

from __future__ import annotations

import contextlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.server import Server, ask

OVERHEAD_TOKENS = 16


def throughput(
    server: Server, name: str, texts: list[str], requests_each: int, new_tokens: int
) -> float:
    """Tokens per second of a client per text, each of which asks again once it is answered."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(texts)) as clients:
        connections = [stack.enter_context(contextlib.closing(server.connect())) for _ in texts]

        def tokens(count: int, new_tokens: int) -> int:
            answers = clients.map(
                lambda c, text: sum(
                    ask(c, name, text, new_tokens)[1]["tokens"] for _ in range(count)
                ),
                connections,
                texts,
            )
            return sum(answers)

        tokens(1, 2)
        began = time.perf_counter()
        return tokens(requests_each, new_tokens) / (time.perf_counter() - began)


def overhead_ms(server: Server, name: str, text: str, count: int) -> float:
    """What a request takes longer than the engine says: the median of `count`, in turn."""
    with contextlib.closing(server.connect()) as connection:
        answers = [ask(connection, name, text, OVERHEAD_TOKENS) for _ in range(count + 1)][1:]
    return 1000 * statistics.median(took - float(answer["seconds"]) for took, answer in answers)
