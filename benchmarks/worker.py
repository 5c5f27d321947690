"""The inside of a measured process: a command a line on stdin, an answer a line on stdout, as JSON.

Standard library only: it also runs in the environment of the peers.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any


class Channel:
    """What libraries print to stdout goes to stderr from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def serve(self, about: Mapping[str, Any], commands: Mapping[str, Callable[..., Any]]) -> None:
        """Says `about`, then runs commands until stdin ends."""
        self._send({"result": about})
        for line in sys.stdin:
            order = json.loads(line)
            try:
                self._send({"result": commands[order["command"]](**order["options"])})
            except Exception as error:
                traceback.print_exc()
                self._send({"error": f"{type(error).__name__}: {error}"})

    def _send(self, answer: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


class Clock:
    """Seconds of each step of a generation: the first holds the prompt."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._last = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._last)
        self._last = now


Generate = Callable[[list[list[int]], int, Clock], list[list[int]]]


def generation(generate: Generate) -> Callable[..., dict[str, Any]]:
    """The `generate` command: a short warm-up, then one timed batch.

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
