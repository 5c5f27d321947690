"""Measured: answers with guesses of their next tokens against answers without.

The guesses are right at a chosen rate: each answer is known from a first run, and some of its
tokens are replaced. That shows for each number of rows the rate at which guesses begin to pay.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import engine.engine
from benchmarks.engine.request import Request
from benchmarks.worker import Channel
from engine.engine import Engine
from engine.guesses import FEWEST, Guesser
from engine.settings import Settings

RIGHT = (0.0, 0.3, 0.6, 1.0)


class Oracle(Guesser):
    """Guesses from known texts, each token right with the probability `right`.

    Without texts it makes no guesses.
    """

    texts: Sequence[list[int]] = ()
    right = 0.0
    random = random.Random(1)  # noqa: S311

    def guess(self, ids: Sequence[int], limit: int) -> list[int]:
        for text in self.texts:
            if text[: len(ids)] == list(ids):
                known = text[len(ids) :][: min(FEWEST, limit)]
                return [
                    token if self.random.random() < self.right else max(token - 1, 0)
                    for token in known
                ]
        return []


def main() -> None:
    folder, vocab_size, prompt_tokens, new_tokens = sys.argv[1], *map(int, sys.argv[2:5])
    vars(engine.engine)["Guesser"] = Oracle
    server = Engine(
        Settings(backend="native", precision="int8", prefix_cache_mib=0, speculation="auto")
    )
    server.load("m", folder)
    drawn = random.Random(2)  # noqa: S311

    def prompt() -> list[int]:
        return drawn.choices(range(4, vocab_size), k=prompt_tokens)

    def seconds(prompts: list[list[int]], texts: Sequence[list[int]]) -> tuple[float, Any]:
        Oracle.texts = texts
        began = time.perf_counter()
        requests = [Request(server, prompt, new_tokens) for prompt in prompts]
        ids = [request.wait().ids for request in requests]
        return time.perf_counter() - began, ids

    def measure(rows: Sequence[int]) -> dict[str, dict[str, float]]:
        """For each number of rows and rate: the time without guesses over that with them."""
        results: dict[str, dict[str, float]] = {}
        seconds([prompt() for _ in range(max(rows))], ())  # warm-up
        for count in rows:
            results[str(count)] = {}
            for Oracle.right in RIGHT:
                prompts = [prompt() for _ in range(count)]
                without, answers = seconds(prompts, ())
                texts = [p + a for p, a in zip(prompts, answers, strict=True)]
                guessing, again = seconds(prompts, texts)
                assert again == answers
                results[str(count)][str(Oracle.right)] = without / guessing
        return results

    Channel().serve({"guesses": FEWEST}, {"measure": measure})
    server.close()


if __name__ == "__main__":
    main()
