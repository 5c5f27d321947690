"""A model of the registry, and its state."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyio import CancelScope

from common.errors import ServiceError
from serving.errors import Unavailable
from serving.models.admission import Line
from serving.models.model_settings import ModelSettings
from serving.store import Fetched, StoredModel

LOAD_S = 0.3  # assumed duration of a load in the engine, and of one that is not measured yet


class State(enum.Enum):
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Restarts:
    """Restarts of a model's worker, and the time of the next one."""

    failures: int = 0  # in a row
    next_at: float = 0.0  # on the monotonic clock
    back_at: float = 0.0  # end of the last successful one
    reason: str = ""


@dataclass
class Model:
    """A model that is loading, loaded or draining."""

    name: str
    url: str
    id: str  # MMS's name for it
    stored: StoredModel
    options: Mapping[str, Any]  # of the load request, for its worker
    # Those of its file included, once fetched.
    settings: ModelSettings = field(default_factory=ModelSettings)
    state: State = State.FETCHING
    fetched: Fetched | None = None
    stored_base: StoredModel | None = None  # of an adapter
    base: Fetched | None = None
    in_flight: int = 0
    last_used: float = field(default_factory=lambda: time.monotonic())
    last_shared: float = field(default_factory=lambda: time.monotonic())  # by concurrent requests
    restoring: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    starts: int = 0  # of its worker; a changed number makes earlier observations stale
    load_s: float = LOAD_S  # duration of its last load, without the fetch
    in_engine: bool = True  # otherwise it is in its own worker
    residency: str = ""  # hot or parked, of the last poll of the engine
    socket: str = ""  # where its worker listens for MMS
    connections: int = 1  # of MMS's to that worker, for a model of the engine's
    error: Exception | None = None
    shortage: ServiceError | None = None  # the memory or disk that its load waits for
    # Of requests at its worker. Cancelled when that is replaced; then the requests are retried.
    pending: set[CancelScope] = field(default_factory=set)
    line: Line = field(default_factory=Line)  # its queue
    batch_size: int = 1  # requests in one call of its worker
    metadata: dict[str, Any] = field(default_factory=dict)  # from its worker, for /v2
    # Its running load, or its worker's restart; unloading cancels it.
    work: asyncio.Task[None] | None = None
    changed: Callable[[Model], None] = lambda model: None  # called by `set`
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def engine_name(self) -> str:
        """The name in the engine, unique per load: a new version can load beside the old one."""
        return f"{self.name}#{self.id}"

    @property
    def version(self) -> str:
        """The version for /v2."""
        return str((self.metadata.get("versions") or ["1"])[0])

    @property
    def request_timeout_s(self) -> float:
        """The limit of an answer."""
        return float(self.settings.timeout_s or self.options["response_timeout"])

    def set(self, state: State | None = None) -> None:
        """Sets the state, if given, and wakes `change`."""
        if state is not None:
            self.state = state
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self.changed(self)

    async def change(self) -> None:
        """Waits for the next `set`."""
        await self._changed.wait()


def eviction_timeout(shortage: ServiceError, waited_s: float) -> Unavailable:
    """The error of a request or load that timed out while other models were being evicted."""
    return Unavailable(f"no memory or disk became free within {waited_s:g} s: {shortage.message}")
