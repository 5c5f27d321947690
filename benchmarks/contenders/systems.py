"""Systems that `uses` measures: the engine, the server, and peers with continuous batching."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import peers
from benchmarks.contenders.contender import PEER
from benchmarks.engine.uses import PARTS, PREFIX_CACHED
from benchmarks.process import Worker
from engine.artifacts.config import GPT2Config

INT8 = ("mxnet", "int8")


@dataclass(frozen=True)
class System:
    name: str
    label: str
    parts: Sequence[str] = PARTS

    def start(self, config: GPT2Config, artifact: Path, exports: Path, logs: Path) -> Worker:
        """Raises `BenchmarkError`."""
        log, inner = logs / f"{self.name}.log", logs / f"{self.name}-server.log"
        cores = len(os.sched_getaffinity(0))
        if self.name == "openvino-genai":
            python = peers.python("openvino")
            model = peers.export("openvino", artifact, exports, log)
            environment = {name: value.format(cores) for name, value in PEER.items()}
            arguments: list[str | Path] = [model, str(cores), "keeps"]
            return Worker(python, "contenders.openvino", arguments, log, environment)
        if self.name == "llama-server":
            peers.python("llama.cpp")
            model = peers.export("llama.cpp", artifact, exports, log)
            module, arguments = "llama_server", [model, str(config.max_length), inner]
        elif self.name == "server":
            module, arguments = "our_server", [artifact, inner]
        else:
            module, arguments = "our_engine", [*INT8, artifact]
            arguments += ["0"] if self.name == "engine-anew" else []
        return Worker(sys.executable, f"contenders.{module}", arguments, log)


SYSTEMS = (
    System("engine", "ours, in one process", (*PARTS, "chat_at_once_s")),
    System("engine-anew", "ours, nothing kept of prompts", PREFIX_CACHED),
    System("openvino-genai", "OpenVINO GenAI, in one process"),
    System("server", "ours, over HTTP"),
    System("llama-server", "llama.cpp's server, over HTTP"),
)
