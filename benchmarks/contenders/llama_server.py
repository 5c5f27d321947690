"""Contender in what people send: llama.cpp's server with eight slots.

Its defaults but for the slots, a context of each as long as the model's, and as many threads as
cores: continuous batches, prompts kept in memory (8 GiB), flash attention as it chooses.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders.peers import MISSING, SERVER
from benchmarks.contenders.streamed import Streamed
from benchmarks.engine.uses import ROWS, SAMPLED, measurement
from benchmarks.process import BenchmarkError, Program, fetch
from benchmarks.server import free_port
from benchmarks.worker import Channel

GREEDY = {"temperature": 0, "return_tokens": True, "ignore_eos": True, "stream": True}


class LlamaServer(Program):
    """`options` beside those that follow from the machine."""

    def __init__(self, options: Mapping[str, object], log: Path) -> None:
        if not SERVER.exists():
            raise BenchmarkError(MISSING)
        self.port = free_port()
        cores = len(os.sched_getaffinity(0))
        options = {"host": "127.0.0.1", "port": self.port, "threads": cores, **options}
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        super().__init__([SERVER, *given, "--no-ui", "--no-warmup"], log)
        self._wait(lambda: self.get("/health"))

    def get(self, path: str) -> Any:
        """None where it does not answer."""
        try:
            url = f"http://127.0.0.1:{self.port}{path}"
            return json.loads(fetch(url, 10))
        except OSError:
            return None


def main() -> None:
    model, context, log = sys.argv[1:]
    options = {"model": model, "parallel": ROWS, "ctx-size": ROWS * int(context)}
    with LlamaServer(options, Path(log)) as server:

        def ask(
            ids: list[int], new_tokens: int, sampled: bool = False, answers: int = 1
        ) -> Streamed:
            body = {"prompt": ids, "n_predict": new_tokens, "n_cmpl": answers, **GREEDY}
            if sampled:
                body |= {**SAMPLED, "min_p": 0, "seed": 1}
            return Streamed(server.port, "/completion", body)

        Channel().serve({}, {"measure": measurement(ask)})


if __name__ == "__main__":
    main()
