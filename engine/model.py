"""A loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.artifacts.config import GPT2Config
from engine.backends import row_bytes
from engine.backends.interface import BackendModel
from engine.prepared.manifest import Run
from engine.scheduler import Batch
from engine.statistics import Statistics
from engine.text.texts import Texts


@dataclass(eq=False)
class Model:
    """Its weights on a backend, its texts, its batch.

    It is resident, which is that it can compute, or it waits on the disk: `engine.residency`
    decides.
    """

    name: str
    path: Path
    backend: str
    precision: str
    config: GPT2Config
    open: Callable[[Run], BackendModel]  # raises `EngineError`
    texts: Texts
    batch: Batch
    reserved_bytes: int  # of its weights, in memory
    statistics: Statistics = field(default_factory=Statistics)
    load_s: float = 0.0
    prefilled_at: int = 0  # the engine's turn in which it last computed a part of a prompt
    compute: BackendModel | None = None  # while it is open
    resident: bool = False
    opening: bool = False  # by a thread
    closing: bool = False
    held_bytes: int = 0  # of the budget
    submitting: int = 0  # requests whose prompts are being cut
    resident_since: float = 0.0
    opening_s: float = 0.0  # what it last took to make it resident

    @property
    def row_bytes(self) -> int:
        """Of the keys and values of a row of full context."""
        return row_bytes(self.config, self.precision)

    @property
    def moving(self) -> bool:
        return self.opening or self.closing

    @property
    def is_mapped(self) -> bool:
        """Whether its weights are page cache, which the kernel may take."""
        return self.compute is not None and bool(self.compute.mapped)

    @property
    def can_step(self) -> bool:
        return self.resident and not self.moving

    @property
    def idle(self) -> bool:
        return not self.submitting and not self.batch.has_work

    @property
    def answered(self) -> bool:
        """Whether everybody who asked has the whole answer."""
        return self.idle and self.texts.idle

    def held(self) -> dict[str, Any]:
        """Where it is and what it takes of the budget, for whoever asks often."""
        return {
            "name": self.name,
            "residency": "hot" if self.resident else "parked",
            # What goes with it at most: the other models may need a shorter row.
            "reserved_bytes": self.reserved_bytes,
            "row_bytes": self.row_bytes,
            "kv_bytes": self.batch.kv_bytes,
        }

    def describe(self) -> dict[str, Any]:
        compute, counters = self.compute, self.statistics
        return {
            **self.held(),
            "model_dir": str(self.path),
            "backend": self.backend,
            "precision": self.precision,
            "parameters": self.config.num_parameters,
            "max_length": self.config.max_length,
            "weight_bytes": 0 if compute is None else compute.weight_bytes,
            "held_bytes": self.held_bytes,
            "load_seconds": round(self.load_s, 3),
            "running": len(self.batch.running),
            "waiting": len(self.batch.waiting),
            "prefix_bytes": self.batch.prefix_bytes,
            **vars(counters),
            "queue_s": counters.queue_s.describe(),
            "time_to_first_token_s": counters.time_to_first_token_s.describe(),
        }
