"""Who is measured side by side, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contenders import peers
from benchmarks.process import Process


@dataclass(frozen=True)
class Contender:
    name: str
    label: str
    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[int] = (1, 8)
    peer: bool = False

    def start(self, artifact: Path, exports: Path, log: Path) -> Process:
        """`exports` is where the peers' models are kept. Raises `BenchmarkError`."""
        threads = str(len(os.sched_getaffinity(0)))
        module = f"contenders.{self.module}"
        if self.peer:
            model = peers.export(self.name, artifact, exports, log)
            environment = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
            return Process(peers.PYTHON, module, [model, threads], log, environment)
        environment = {key: value.format(threads) for key, value in self.environment.items()}
        return Process(sys.executable, module, [artifact, *self.arguments], log, environment)


MXNET_DEFAULTS = {"OMP_NUM_THREADS": "{}", "MXNET_CPU_WORKER_NTHREADS": "1"}

CONTENDERS = (
    Contender("guides", "the guides' loop, fp32", "guides_loop", (), MXNET_DEFAULTS, (1,)),
    Contender("mxnet", "ours, mxnet fp32", "ours", ("mxnet", "fp32")),
    Contender("transformers", "transformers fp32", "transformers", peer=True),
    Contender("onnxruntime-fp32", "ours, onnxruntime fp32", "ours", ("onnxruntime", "fp32")),
    Contender("ctranslate2", "CTranslate2 int8", "ctranslate2", peer=True),
    Contender("llama.cpp", "llama.cpp Q8_0", "llama_cpp", peer=True),
    Contender("onnxruntime-int8", "ours, onnxruntime int8", "ours", ("onnxruntime", "int8")),
)
