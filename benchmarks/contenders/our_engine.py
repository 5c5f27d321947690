"""Contender in what people send: our engine with its defaults, in one process."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.engine.request import Request
from benchmarks.engine.uses import SAMPLED, measurement
from benchmarks.worker import Channel
from engine.engine import Engine
from engine.settings import Settings


def main() -> None:
    backend, precision, folder, *given = sys.argv[1:]
    settings = Settings(backend=backend, precision=precision)
    if given:
        settings = Settings(backend=backend, precision=precision, prefix_cache_mib=int(given[0]))
    engine = Engine(settings)
    engine.load("m", folder)

    def ask(ids: list[int], new_tokens: int, sampled: bool = False, answers: int = 1) -> Request:
        how: dict[str, Any] = {"do_sample": True, "seed": 1, **SAMPLED} if sampled else {}
        return Request(engine, ids, new_tokens, num_return_sequences=answers, **how).wait()

    Channel().serve({}, {"measure": measurement(ask)})
    engine.close()


if __name__ == "__main__":
    main()
