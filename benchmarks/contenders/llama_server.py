"""llama.cpp's server: with eight slots, with adapters, or as a router of models.

It has its defaults except for the slots, their context, and one thread per core: continuous
batching, a prompt cache of 8 GiB, and automatic flash attention. With adapters and as a router it
computes all prompts, as this server then does by `COMPUTE_ALL_PROMPTS`.
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

CONTEXT = 512  # tokens of all slots of a model together, with many models
COMPUTE_ALL_PROMPTS = {"ENGINE_PREFIX_CACHE_MIB": "0"}
GREEDY = {"temperature": 0, "return_tokens": True, "ignore_eos": True, "stream": True}


class LlamaServer(Program):
    """A process of llama.cpp's server; `options` are added to those of the machine."""

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
        """Return the JSON of a GET request, or None if the server does not answer."""
        try:
            return json.loads(fetch(f"http://127.0.0.1:{self.port}{path}", 10))
        except OSError:
            return None

    def stream(
        self, model: str, ids: list[int], new_tokens: int, **parameters: Any
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a streaming request."""
        body = {"model": model, "prompt": ids, "n_predict": new_tokens}
        return "/completion", {**body, **GREEDY, **self.parameters(model), **parameters}

    def parameters(self, model: str) -> dict[str, Any]:
        """Return what every request to a model has beside the body of `stream`."""
        return {}

    def states(self) -> dict[str, str]:
        return {}


class LlamaAdapters(LlamaServer):
    """A base with adapters, GGUF files by name. Requests to different adapters share no batch."""

    def __init__(self, base: Path, adapters: Mapping[str, Path], rows: int, log: Path) -> None:
        self._numbers = {name: number for number, name in enumerate(adapters)}
        files = ",".join(map(str, adapters.values()))
        options = {"model": base, "lora": files, "ctx-size": CONTEXT, "parallel": rows}
        super().__init__(options, log)

    def parameters(self, model: str) -> dict[str, Any]:
        return {"lora": [{"id": self._numbers[model], "scale": 1.0}], "cache_prompt": False}


class Router(LlamaServer):
    """A router that starts a process per requested model, at most `at_once`, as llama-swap does.

    `models_dir` has the GGUF files; a model's name is its file's without the suffix. Before
    another process would exceed `at_once`, that of the least recently used model ends.
    """

    def __init__(self, models_dir: Path, at_once: int, rows: int, log: Path) -> None:
        options = {"models-dir": models_dir, "models-max": at_once}
        super().__init__({**options, "ctx-size": CONTEXT, "parallel": rows}, log)

    def parameters(self, model: str) -> dict[str, Any]:
        return {"cache_prompt": False}

    def states(self) -> dict[str, str]:
        rows = (self.get("/v1/models") or {}).get("data", [])
        return {row["id"]: "hot" for row in rows if row["status"]["value"] == "loaded"}
