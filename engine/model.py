"""A loaded model, and its core: the weights and the batch that it may share with others."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.backends import row_bytes
from engine.backends.interface import Adapter, BackendModel
from engine.classification import Head
from engine.guesses import Recent
from engine.prepared.manifest import Run
from engine.scheduler import Batch
from engine.statistics import Statistics
from engine.text.texts import Texts


class Residence(enum.Enum):
    """Where the weights of a core are, see `engine.residency`."""

    EVICTED = enum.auto()  # on the disk
    OPENING = enum.auto()  # a thread is opening it
    RESIDENT = enum.auto()  # it can compute
    CLOSING = enum.auto()  # it was evicted, and a thread is closing it


@dataclass(eq=False)
class Core:
    """Weights on a backend and the batch that computes with them.

    A core belongs to one model, or to a base and its adapters.
    """

    name: str
    key: Hashable  # equal for equal weights, backend and precision
    backend: str
    precision: str
    artifact: Artifact
    open: Callable[[Run], BackendModel]  # raises `EngineError`
    batch: Batch
    reserved_bytes: int  # bytes of the weights while they are in memory
    models: set[Model] = field(default_factory=set)  # the models that share it
    lost: bool = False  # after a fault in its batch
    prefilled_at: int = 0  # the last turn of the step loop that computed prompt tokens
    compute: BackendModel | None = None  # while it is open
    residence: Residence = Residence.EVICTED
    held_bytes: int = 0  # bytes that the budget counts for it now
    resident_since: float = 0.0
    opening_s: float = 0.0  # how long the last opening took

    @property
    def config(self) -> GPT2Config:
        return self.artifact.config

    @property
    def row_bytes(self) -> int:
        """K/V bytes of a row of full context."""
        return row_bytes(self.config, self.precision)

    @property
    def resident(self) -> bool:
        return self.residence is Residence.RESIDENT

    @property
    def moving(self) -> bool:
        return self.residence in (Residence.OPENING, Residence.CLOSING)

    @property
    def is_mapped(self) -> bool:
        """Whether the weights are mapped files, whose pages the kernel may evict."""
        return self.compute is not None and bool(self.compute.mapped)

    @property
    def idle(self) -> bool:
        return not self.batch.has_work and not any(model.submitting for model in self.models)


@dataclass(eq=False)
class Model:
    """A loaded model by the name that requests use; an adapter adds its weights to the core's."""

    name: str
    path: Path
    core: Core
    texts: Texts
    adapter: Adapter | None = None
    base: Path | None = None  # the base's folder that the load named
    whole_because: str = ""  # why the model shares nothing with that base
    head: Head | None = None  # of a classifier
    statistics: Statistics = field(default_factory=Statistics)
    recent: Recent = field(default_factory=Recent)
    load_s: float = 0.0
    submitting: int = 0  # requests whose prompts are being tokenized
    held_bytes: int = 0  # bytes that the budget counts for its adapter now, if it is large
    parked: bool = False  # whether its adapter does not count as in memory, see `engine.residency`

    @property
    def config(self) -> GPT2Config:
        return self.core.config

    @property
    def batch(self) -> Batch:
        return self.core.batch

    @property
    def own_bytes(self) -> int:
        """Bytes of its adapter or delta and its head, which it does not share."""
        return sum(part.num_bytes for part in (self.adapter, self.head) if part is not None)

    @property
    def _parked_bytes(self) -> int:
        return self.adapter.num_bytes if self.parked and self.adapter is not None else 0

    @property
    def answered(self) -> bool:
        """Whether the model has no request that is tokenized, queued, running or being sent."""
        return not self.submitting and not self.batch.unfinished(self) and self.texts.idle

    def held(self) -> dict[str, Any]:
        """Return residency, base and budgeted bytes; models that share weights divide these."""
        core = self.core
        return {
            "name": self.name,
            "residency": "hot" if core.resident and not self.parked else "parked",
            # What unloading it frees at most: the other models may need a shorter row.
            "reserved_bytes": self.own_bytes + core.reserved_bytes // max(len(core.models), 1),
            "row_bytes": core.row_bytes,
            "kv_bytes": self.batch.kv_bytes(self),
            **self._sharing(),
        }

    def _sharing(self) -> dict[str, str]:
        """Return the base, or why the model shares nothing with the base that its load named."""
        if self.whole_because:
            return {"whole_because": self.whole_because}
        return {} if self.base is None else {"base": str(self.base)}

    def describe(self) -> dict[str, Any]:
        core, compute, counters = self.core, self.core.compute, self.statistics
        return {
            **self.held(),
            "model_dir": str(self.path),
            "backend": core.backend,
            "precision": core.precision,
            "parameters": self.config.num_parameters,
            "max_length": self.config.max_length,
            **({} if self.head is None else {"classifier": self.head.classifier.to_json()}),
            "weight_bytes": self.own_bytes + (0 if compute is None else compute.weight_bytes),
            "held_bytes": self.own_bytes - self._parked_bytes + core.held_bytes,
            "load_seconds": round(self.load_s, 3),
            "running": self.batch.num_running(self),
            "waiting": self.batch.num_waiting(self),
            "prefix_bytes": self.batch.prefix_bytes(self),
            **vars(counters),
            "queue_s": counters.queue_s.describe(),
            "time_to_first_token_s": counters.time_to_first_token_s.describe(),
        }
