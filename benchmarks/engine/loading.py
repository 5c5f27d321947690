"""Measures how long `python -m engine` takes to load a model, and the memory it needs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.page_cache import present
from engine.http.client import LOAD_TIMEOUT_S, EngineClient
from testbed.process import ROOT, Program
from testbed.process_tree import rollup

TOUCH_TOKENS = 16  # enough for every page of the weights to have been used


class Engine(Program):
    """A process of `python -m engine`, in int8 and otherwise with the default settings."""

    def __init__(self, log: Path, cache_dir: Path | None = None, root: Path = ROOT) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="engine-")
        socket = str(Path(self._folder.name) / "engine.sock")
        settings = {"ENGINE_BACKEND": self.backend, "ENGINE_PRECISION": "int8"}
        settings |= {"ENGINE_SOCKET": socket, "ENGINE_CACHE_DIR": str(cache_dir or "")}
        self._client = EngineClient(socket)
        super().__init__([sys.executable, "-m", "engine"], log, settings, root)
        self._wait(lambda: self._client.request("GET", "/health", timeout_s=2))

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def load(self, name: str, folder: Path, base: Path | None = None) -> float:
        """Load a model; return the seconds until it is ready."""
        began = time.perf_counter()
        body = {"name": name, "model_dir": str(folder), "base": base and str(base)}
        self.about = self._client.request("POST", "/models", body, LOAD_TIMEOUT_S)
        return time.perf_counter() - began

    def unload(self, name: str) -> None:
        self._client.request("DELETE", f"/models/{name}")

    def generate(self, name: str, text: str, new_tokens: int) -> None:
        body = {"inputs": text, "parameters": {"max_new_tokens": new_tokens}}
        self._client.request("POST", f"/models/{name}/generate", body)

    def memory(self) -> dict[str, int]:
        """Return the engine's resident bytes, and how many of them are anonymous: in no file."""
        results = rollup(self.pid)
        return {"rss_bytes": results["Rss"], "anonymous_bytes": results["Anonymous"]}


def measure_loading(
    folder: Path, another: Path, text: str, tries: int, log: Path
) -> dict[str, Any]:
    """Measure seconds from a load to ready and to the first token, page cache warm and cold.

    Also measures, once, the very first load, which quantizes and fills the cache, of this model
    and then of another of its shape, and the disk space of a prepared model.
    """
    results: dict[str, Any] = {"warm": [], "cold": []}
    with Engine(log) as engine:
        for kind in ("first", *("cold", "warm") * tries):
            resident = drop_pages(folder) if kind == "cold" else 1.0
            began = time.perf_counter()
            ready = engine.load("m", folder)
            engine.generate("m", text, 1)
            first = time.perf_counter() - began
            row = {"ready_s": ready, "first_token_s": first, "resident_share": resident}
            results.setdefault(kind, []).append(row)
            engine.unload("m")
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".cache-") as empty,
        Engine(log, Path(empty)) as engine,
    ):
        for key, model in (("without_cache_s", folder), ("another_without_cache_s", another)):
            before = _disk_bytes(Path(empty))
            results[key] = engine.load("m", model)
            engine.unload("m")
            results["prepared_bytes"] = _disk_bytes(Path(empty)) - before
    return results


def drop_pages(folder: Path) -> float:
    """Drop files from the page cache, as a restart of the machine does, without being root.

    Returns the share that stayed in memory. Pages that a process has mapped stay, so nothing may
    have the files open. The disk below, or the machine that emulates it, may have its own cache.
    """
    resident = total = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only clean pages can go
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = np.memmap(path, dtype=np.uint8, mode="r")
            results = present(mapped.ctypes.data, len(mapped))
            resident, total = resident + int(results.sum()), total + len(results)
    return resident / max(total, 1)


def _disk_bytes(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.iterdir())


def measure_memory(folders: list[Path], text: str, log: Path) -> dict[str, Any]:
    """Measure what each further model adds to the engine's memory after generating tokens."""
    steps = []
    with Engine(log) as engine:
        for i, folder in enumerate(folders):
            engine.load(str(i), folder)
            engine.generate(str(i), text, TOUCH_TOKENS)
            steps.append(engine.memory())
    more = len(folders) - 1
    return {
        "models": len(folders),
        "weight_bytes": engine.about["weight_bytes"],
        "each": {key: (steps[-1][key] - steps[0][key]) / more for key in steps[0]},
        "after_each_load": steps,
    }


def measure_cycles(
    folder: Path, text: str, cycles: int, settling: int, log: Path
) -> dict[str, Any]:
    """Measure the engine's memory before and after `cycles` loads, answers and unloads.

    *Before* is after `settling` earlier cycles, which load libraries and start threads with heaps.
    """
    after_each = []
    with Engine(log) as engine:
        for _ in range(settling + cycles):
            engine.load("m", folder)
            engine.generate("m", text, TOUCH_TOKENS)
            engine.unload("m")
            after_each.append(engine.memory())
    before, after = after_each[settling - 1], after_each[-1]
    return {"cycles": cycles, "before": before, "after": after, "after_each": after_each}
