"""A loaded model, and what is counted of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backends import BackendModel
from engine.histogram import Histogram
from engine.prompts import Prompts
from engine.scheduler import Batch


@dataclass
class Statistics:
    """Counters of one model since it was loaded."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: int = 0  # summed over steps: rows / steps is the mean batch size
    queue_s: Histogram = field(default_factory=Histogram)  # until its prompt is begun
    time_to_first_token_s: Histogram = field(default_factory=Histogram)
    seconds_per_request: float = 0.0  # moving average


@dataclass
class Model:
    """Its weights on a backend, its way with text, its batch."""

    name: str
    path: Path
    backend: str
    precision: str
    compute: BackendModel
    prompts: Prompts
    batch: Batch
    reserved_bytes: int
    load_s: float
    prefilled_at: int = 0  # the engine's turn in which it last computed a part of a prompt
    statistics: Statistics = field(default_factory=Statistics)

    def describe(self) -> dict[str, Any]:
        config, counters = self.compute.config, self.statistics
        return {
            "name": self.name,
            "model_dir": str(self.path),
            "backend": self.backend,
            "precision": self.precision,
            "parameters": config.num_parameters,
            "max_length": config.max_length,
            "weight_bytes": self.compute.weight_bytes,
            "kv_bytes": self.compute.kv_bytes,
            "load_seconds": round(self.load_s, 3),
            "running": len(self.batch.rows),
            "waiting": len(self.batch.waiting),
            **vars(counters),
            "queue_s": counters.queue_s.describe(),
            "time_to_first_token_s": counters.time_to_first_token_s.describe(),
        }
