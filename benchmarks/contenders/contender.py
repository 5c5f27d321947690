"""Who is measured side by side, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contenders import peers
from benchmarks.process import Worker


@dataclass(frozen=True)
class Contender:
    """An engine that is measured, in a process of its own.

    A peer gets the model in its format and the number of threads; ours the artifact and
    `arguments`.
    """

    name: str
    label: str
    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[int] = (1, 8)

    def start(self, artifact: Path, exports: Path, log: Path) -> Worker:
        """`exports` is where the peers' models are kept. Raises `BenchmarkError`."""
        threads = str(len(os.sched_getaffinity(0)))
        environment = {key: value.format(threads) for key, value in self.environment.items()}
        python = Path(sys.executable)
        arguments: list[str | Path] = [artifact, *self.arguments]
        if self.name in peers.MODULES:
            python = peers.python(self.name)
            arguments = [peers.export(self.name, artifact, exports, log), threads]
        return Worker(python, f"contenders.{self.module}", arguments, log, environment)


THREADS = {"OMP_NUM_THREADS": "{}"}
MXNET_DEFAULTS = {**THREADS, "MXNET_CPU_WORKER_NTHREADS": "1"}
PEER = {**THREADS, "HF_HUB_OFFLINE": "1"}

CONTENDERS = (
    Contender("guides", "the guides' loop, fp32", "guides_loop", (), MXNET_DEFAULTS, (1,)),
    Contender("transformers", "transformers fp32", "transformers", (), PEER),
    Contender("fp32", "ours, fp32", "ours", ("native", "fp32")),
    Contender("ctranslate2", "CTranslate2 int8", "ctranslate2", (), PEER),
    Contender("llama.cpp", "llama.cpp Q8_0", "llama_cpp", (), PEER),
    Contender("openvino", "OpenVINO int8", "openvino", (), PEER),
    Contender("mxnet", "ours, int8, by MXNet's operator", "ours", ("mxnet", "int8")),
    Contender("int8", "ours, int8", "ours", ("native", "int8")),
)
