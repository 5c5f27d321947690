"""llama.cpp's server: with eight slots, with adapters, or as a router of models.

Its defaults but for the slots, their context, and as many threads as cores: continuous batches,
prompts kept in memory (8 GiB), flash attention as it chooses.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders.llama_cpp import CRASHES_ON_AMX
from benchmarks.contenders.peers import MISSING, SERVER
from testbed.process import Program, ProgramError, fetch, free_port
from testbed.server import CALL_S

CONTEXT = 512  # tokens of all requests of a model together, where there are many
GREEDY = {"temperature": 0, "return_tokens": True, "ignore_eos": True, "stream": True}


class LlamaServer(Program):
    """`options` beside those that follow from the machine."""

    def __init__(self, options: Mapping[str, object], log: Path) -> None:
        if not SERVER.exists():
            raise ProgramError(MISSING)
        self.port = free_port()
        cores = len(os.sched_getaffinity(0))
        options = {"host": "127.0.0.1", "port": self.port, "threads": cores, **options}
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        given += ["--no-ui", "--no-warmup", *["--no-repack"] * CRASHES_ON_AMX]
        super().__init__([SERVER, *given], log)
        self._wait(lambda: self.get("/health"))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)

    def get(self, path: str) -> Any:
        """None where it does not answer."""
        try:
            return json.loads(fetch(f"http://127.0.0.1:{self.port}{path}", 10))
        except OSError:
            return None

    def stream(
        self, model: str, ids: list[int], new_tokens: int, **parameters: Any
    ) -> tuple[str, dict[str, Any]]:
        """The path and the body of a call that answers with a stream."""
        body = {"model": model, "prompt": ids, "n_predict": new_tokens}
        return "/completion", {**body, **GREEDY, **parameters}

    def states(self) -> dict[str, str]:
        return {}


class LlamaAdapters(LlamaServer):
    """`adapters` are GGUF files by name. Requests to different ones share no batch."""

    def __init__(self, base: Path, adapters: Mapping[str, Path], rows: int, log: Path) -> None:
        self._numbers = {name: number for number, name in enumerate(adapters)}
        files = ",".join(map(str, adapters.values()))
        options = {"model": base, "lora": files, "ctx-size": CONTEXT, "parallel": rows}
        super().__init__(options, log)

    def stream(
        self, model: str, ids: list[int], new_tokens: int, **parameters: Any
    ) -> tuple[str, dict[str, Any]]:
        adapter = {"lora": [{"id": self._numbers[model], "scale": 1.0}], "cache_prompt": False}
        return super().stream(model, ids, new_tokens, **adapter)


class Router(LlamaServer):
    """Does what llama-swap does: a process for each model that is requested, at most `at_once`.

    `models_dir` has the GGUF files; a model is called what its file is, without the suffix. The
    process of the least recently used model ends where there would be more.
    """

    def __init__(self, models_dir: Path, at_once: int, rows: int, log: Path) -> None:
        options = {"models-dir": models_dir, "models-max": at_once}
        super().__init__({**options, "ctx-size": CONTEXT, "parallel": rows}, log)

    def stream(
        self, model: str, ids: list[int], new_tokens: int, **parameters: Any
    ) -> tuple[str, dict[str, Any]]:
        return super().stream(model, ids, new_tokens, cache_prompt=False)  # ours keeps none either

    def states(self) -> dict[str, str]:
        rows = (self.get("/v1/models") or {}).get("data", [])
        return {row["id"]: "hot" for row in rows if row["status"]["value"] == "loaded"}
