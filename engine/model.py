"""A loaded model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backends import BackendModel, row_bytes
from engine.scheduler import Batch
from engine.statistics import Statistics
from engine.texts import Texts


@dataclass
class Model:
    """Its weights on a backend, its texts, its batch."""

    name: str
    path: Path
    backend: str
    precision: str
    compute: BackendModel
    texts: Texts
    batch: Batch
    reserved_bytes: int
    load_s: float
    statistics: Statistics = field(default_factory=Statistics)
    prefilled_at: int = 0  # the engine's turn in which it last computed a part of a prompt

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
            # Of the budget, what goes with it at most: the other models may need a shorter row.
            "reserved_bytes": self.reserved_bytes,
            "row_bytes": row_bytes(config, self.precision),
            "load_seconds": round(self.load_s, 3),
            "running": len(self.batch.rows),
            "waiting": len(self.batch.waiting),
            **vars(counters),
            "queue_s": counters.queue_s.describe(),
            "time_to_first_token_s": counters.time_to_first_token_s.describe(),
        }
