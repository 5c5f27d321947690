"""Measured: `python -m engine`, from outside: how long it loads a model, and what that takes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import page_cache
from benchmarks.process import ROOT, BenchmarkError, await_end
from common.errors import EngineError
from engine.http.client import LOAD_TIMEOUT_S, EngineClient

START_S = 30.0
STOP_S = 10.0
SETTLING = 10
TOUCH_TOKENS = 16  # enough for every page of the weights to have been used


class EngineProcess:
    """An engine of its own, with onnxruntime and int8. A context manager."""

    def __init__(self, log: Path, cache_dir: Path | None = None, root: Path = ROOT) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="engine-")
        socket = str(Path(self._folder.name) / "engine.sock")
        settings = {"ENGINE_BACKEND": "onnxruntime", "ENGINE_PRECISION": "int8"}
        settings |= {"ENGINE_SOCKET": socket, "ENGINE_CACHE_DIR": str(cache_dir or "")}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine"],
                cwd=root,
                env={**os.environ, **settings},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._client = EngineClient(socket)

    def __enter__(self) -> EngineProcess:
        end = time.monotonic() + START_S
        while True:
            try:
                self._client.request("GET", "/health", timeout_s=2)
                return self
            except EngineError:
                if self._process.poll() is not None or time.monotonic() > end:
                    self.__exit__()
                    raise BenchmarkError("the engine did not start") from None
                time.sleep(0.02)

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        await_end(self._process, STOP_S)
        self._folder.cleanup()

    def load(self, name: str, folder: Path) -> dict[str, Any]:
        body = {"name": name, "model_dir": str(folder)}
        about: dict[str, Any] = self._client.request("POST", "/models", body, LOAD_TIMEOUT_S)
        return about

    def unload(self, name: str) -> None:
        self._client.request("DELETE", f"/models/{name}")

    def generate(self, name: str, text: str, new_tokens: int) -> None:
        body = {"inputs": text, "parameters": {"max_new_tokens": new_tokens}}
        self._client.request("POST", f"/models/{name}/generate", body)

    def memory(self) -> dict[str, int]:
        """Resident bytes, and those of them that no file holds."""
        found = {}
        rollup = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text(encoding="ascii")
        for line in rollup.splitlines()[1:]:
            key, value = line.split(":")
            found[key] = int(value.split()[0]) * 1024
        return {"rss_bytes": found["Rss"], "anonymous_bytes": found["Anonymous"]}


def measure_loading(
    folder: Path, another: Path, text: str, tries: int, log: Path
) -> dict[str, Any]:
    """Seconds from the call to ready, and on to the first token; page cache warm and cold.

    And once what the very first load takes, which quantizes and fills the cache, of this model and
    then of another of its shape; and the disk that a prepared model takes.
    """
    found: dict[str, Any] = {"warm": [], "cold": []}
    with EngineProcess(log) as engine:

        def load(kind: str | None) -> None:
            files = [path for path in folder.rglob("*") if path.is_file()]
            resident = page_cache.drop(files) if kind == "cold" else 1.0
            began = time.perf_counter()
            engine.load("m", folder)
            ready = time.perf_counter()
            engine.generate("m", text, 1)
            first = time.perf_counter()
            if kind:
                seconds = {"ready_s": ready - began, "first_token_s": first - began}
                found[kind].append({**seconds, "resident_share": resident})
            engine.unload("m")

        load(None)
        for _ in range(tries):
            load("cold")
            load("warm")
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".cache-") as empty,
        EngineProcess(log, Path(empty)) as engine,
    ):
        for key, model in (("without_cache_s", folder), ("another_without_cache_s", another)):
            before = _disk_bytes(Path(empty))
            began = time.perf_counter()
            engine.load("m", model)
            found[key] = time.perf_counter() - began
            engine.unload("m")
            found["prepared_bytes"] = _disk_bytes(Path(empty)) - before
    return found


def _disk_bytes(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.iterdir())


def measure_memory(folders: list[Path], text: str, log: Path) -> dict[str, Any]:
    """What each further model adds to the engine's memory once it has made tokens."""
    steps = []
    with EngineProcess(log) as engine:
        for i, folder in enumerate(folders):
            about = engine.load(str(i), folder)
            engine.generate(str(i), text, TOUCH_TOKENS)
            steps.append(engine.memory())
    more = len(folders) - 1
    each = {key: (steps[-1][key] - steps[0][key]) / more for key in steps[0]}
    return {"models": len(folders), "weight_bytes": about["weight_bytes"], "each": each} | {
        "after_each_load": steps
    }


def measure_cycles(folder: Path, text: str, cycles: int, log: Path) -> dict[str, Any]:
    """The engine's memory before and after so many loads, answers and unloads of one model.

    *Before* is after `SETTLING` of them: they bring in the libraries, the threads and their heaps.
    """
    after_each = []
    with EngineProcess(log) as engine:
        for _ in range(SETTLING + cycles):
            engine.load("m", folder)
            engine.generate("m", text, TOUCH_TOKENS)
            engine.unload("m")
            after_each.append(engine.memory())
    return {
        "cycles": cycles,
        "before": after_each[SETTLING - 1],
        "after": after_each[-1],
        "after_each": after_each,
    }
