"""Main program of a measured process: reads JSON commands on stdin, answers in JSON on stdout.

    python -m benchmarks.worker MODULE ARGUMENT ...

MODULE's `start` gets the arguments. Standard library only: it also runs in the peers' environments.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# What `start` returns: a description of the process (versions, sizes), and its commands by name.
Started = tuple[Mapping[str, Any], Mapping[str, Callable[..., Any]]]


def main() -> None:
    """Run commands until stdin ends, then the command `close` if there is one.

    Output of libraries on stdout goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(answer: Mapping[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    module, *arguments = sys.argv[1:]
    about, commands = importlib.import_module(f"benchmarks.{module}").start(*arguments)
    send({"result": about})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            send({"result": commands[order["command"]](**order["options"])})
        except Exception as error:
            traceback.print_exc()
            send({"error": f"{type(error).__name__}: {error}"})
    if "close" in commands:
        commands["close"]()


class Clock:
    """Records the seconds of each step of a generation; the first includes the prefill."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._last = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._last)
        self._last = now


def generation(
    generate: Callable[[list[list[int]], int, Clock], list[list[int]]],
) -> Callable[..., dict[str, Any]]:
    """Return the `generate` command, which times one batch after a short warm-up.

    `generate(prompts, new_tokens, clock)` returns the new ids of each row and calls `clock.step`
    after each step.
    """

    def command(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        generate(prompts, 2, Clock())
        clock = Clock()
        ids = generate(prompts, new_tokens, clock)
        assert all(len(row) == new_tokens for row in ids), [len(row) for row in ids]
        assert len(clock.steps) == new_tokens, len(clock.steps)
        return {"steps_s": clock.steps, "ids": ids}

    return command


def at_once(
    threads: int, call: Callable[..., T], *arguments: Iterable[Any]
) -> tuple[list[T], float]:
    """Map `call` over the arguments in threads; return the results, and the seconds of all."""
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        results = [*pool.map(call, *arguments)]
    return results, time.perf_counter() - began


if __name__ == "__main__":
    main()
