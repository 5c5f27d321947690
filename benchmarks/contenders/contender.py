"""The engines that are measured side by side, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import peers
from benchmarks.engine.uses import PARTS, PREFIX_CACHED
from benchmarks.process import Worker


@dataclass(frozen=True)
class Contender:
    """An engine to measure, run by `benchmarks.contenders.MODULE` in a process of its own.

    peer: the engine's name in `peers.MODULES`, or "" for this project's engine
    rows: batch sizes to measure
    parts: parts of `uses` to measure
    """

    name: str
    label: str
    module: str = ""
    arguments: Sequence[str] = ()
    peer: str = ""
    rows: Sequence[int] = (1, 8)
    parts: Sequence[str] = PARTS

    def start(self, artifact: Path, exports: Path, log: Path) -> Worker:
        """Start the engine. `exports` has models in peers' formats. Raises `ProgramError`."""
        if self.peer:
            return peers.start(self.peer, self.module, artifact, self.arguments, exports, log)
        environment = {}
        if self.name == "guides":  # MXNet's own defaults, on all cores
            threads = str(len(os.sched_getaffinity(0)))
            environment = {"OMP_NUM_THREADS": threads, "MXNET_CPU_WORKER_NTHREADS": "1"}
        given: list[Path | str] = [artifact, *self.arguments]
        if self.module == "our_engine":
            given += [f"backend={Worker.backend}", "precision=int8"]
        return Worker(sys.executable, f"contenders.{self.module}", given, log, environment)


CONTENDERS = (
    Contender("guides", "the guides' loop, fp32", "guides_loop", rows=(1,)),
    Contender("transformers", "transformers fp32", "transformers", peer="transformers"),
    Contender("fp32", "ours, fp32", "ours", ("native", "fp32")),
    Contender("ctranslate2", "CTranslate2 int8", "ctranslate2", peer="ctranslate2"),
    Contender("llama.cpp", "llama.cpp Q8_0", "llama_cpp", peer="llama.cpp"),
    Contender("openvino", "OpenVINO int8", "openvino", peer="openvino"),
    Contender("mxnet", "ours, int8, by MXNet's operator", "ours", ("mxnet", "int8")),
    Contender("int8", "ours, int8", "ours", ("native", "int8")),
)
# Engines with continuous batching, for `uses`. Contenders without a module are HTTP servers.
SYSTEMS = (
    Contender(*("engine", "ours, in one process", "our_engine"), parts=(*PARTS, "chat_at_once_s")),
    Contender(
        *("engine-anew", "ours, nothing kept of prompts", "our_engine"),
        ("prefix_cache_mib=0",),
        parts=PREFIX_CACHED,
    ),
    Contender(
        *("openvino-genai", "OpenVINO GenAI, in one process"), "openvino", ["keeps"], "openvino"
    ),
    Contender("server", "ours, over HTTP"),
    Contender("llama-server", "llama.cpp's server, over HTTP"),
)
