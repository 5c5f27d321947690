"""The peer that switches: llama.cpp's server as a router, a process of its own for each model.

Its router does what llama-swap does: it starts a process for a model that is asked for, and ends
that of the least recently used one where there would be more than so many.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.http_server import free_port
from benchmarks.process import BenchmarkError, await_end

START_S = 60.0
STOP_S = 15.0
CONTEXT = 512  # tokens of all requests of a model together


class LlamaServer:
    """`models_dir` has the GGUF files; a model is called what its file is, without the suffix."""

    def __init__(self, binary: Path, models_dir: Path, at_once: int, rows: int, log: Path) -> None:
        self.port = free_port()
        cores = str(len(os.sched_getaffinity(0)))
        command = [str(binary), "--models-dir", str(models_dir), "--models-max", str(at_once)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--no-ui", "--no-warmup"]
        command += ["--ctx-size", str(CONTEXT), "--parallel", str(rows)]
        command += ["--threads", cores, "--threads-batch", cores]
        began = time.perf_counter()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        self.pid = self._process.pid
        try:
            while not self._get("/health"):
                if self._process.poll() is not None or time.perf_counter() - began > START_S:
                    raise BenchmarkError(f"llama.cpp's server did not start, see {log}")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began

    def _get(self, path: str) -> Any:
        """None where it does not answer."""
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.port}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)

    def states(self) -> dict[str, str]:
        rows = (self._get("/v1/models") or {}).get("data", [])
        return {row["id"]: "hot" for row in rows if row["status"]["value"] == "loaded"}

    def call(self, model: str, ids: list[int], new_tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"model": model, "prompt": ids, "n_predict": new_tokens, "stream": True}
        body |= {"temperature": 0, "return_tokens": True, "ignore_eos": True}
        return "/completion", body | {"cache_prompt": False}  # ours keeps no prompts either

    def token(self, line: bytes) -> str | None:
        event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        return event["content"] if event.get("tokens") else None

    def close(self) -> None:
        self._process.terminate()
        await_end(self._process, STOP_S)
