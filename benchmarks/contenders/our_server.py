"""Contender in what people send: our whole server with its defaults, over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.contenders.streamed import Streamed
from benchmarks.engine.uses import SAMPLED, measurement
from benchmarks.random_model import text_of
from benchmarks.server import Server
from benchmarks.worker import Channel


def main() -> None:
    folder, log = map(Path, sys.argv[1:])
    with Server(folder.parent, log, {"m": folder}) as server:

        def ask(
            ids: list[int], new_tokens: int, sampled: bool = False, answers: int = 1
        ) -> Streamed:
            how: dict[str, Any] = {"do_sample": True, "seed": 1, **SAMPLED} if sampled else {}
            how |= {"max_new_tokens": new_tokens, "num_return_sequences": answers}
            body = {"inputs": text_of(ids), "parameters": how, "stream": True}
            return Streamed(server.port, "/predictions/m", body)

        Channel().serve({}, {"measure": measurement(ask)})


if __name__ == "__main__":
    main()
