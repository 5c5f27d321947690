"""One model that is served, and where it stands in its life."""

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

LOAD_S = 0.3  # of a model of the engine's, and of one whose load nobody has measured


class State(enum.Enum):
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Restarts:
    """How often in a row a model's worker has been lost, and what comes next."""

    failures: int = 0
    next_at: float = 0.0  # on the monotonic clock
    back_at: float = 0.0  # when the last one had worked
    reason: str = ""


@dataclass
class Model:
    """One name that is served or about to be."""

    name: str
    url: str
    id: str  # MMS's name for it
    stored: StoredModel
    options: Mapping[str, Any]  # those of a load request for its worker
    settings: ModelSettings = field(default_factory=ModelSettings)  # its file's too, once fetched
    state: State = State.FETCHING
    fetched: Fetched | None = None
    stored_base: StoredModel | None = None  # of an adapter
    base: Fetched | None = None
    in_flight: int = 0
    last_used: float = field(default_factory=lambda: time.monotonic())
    last_shared: float = field(default_factory=lambda: time.monotonic())  # by requests at once
    restoring: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    starts: int = 0  # of its worker, so far: tells what was seen before the last one
    load_s: float = LOAD_S  # what its last load took, once it was fetched
    in_engine: bool = True  # else its own worker holds it
    residency: str = ""  # hot or parked, as the engine said last
    socket: str = ""  # where its worker listens for MMS
    connections: int = 1  # of MMS's to that worker, for a model of the engine's
    error: Exception | None = None
    shortage: ServiceError | None = None  # what its load waits for room for
    # Cancelled when its worker is given up: requests that wait for that worker try again.
    asked: set[CancelScope] = field(default_factory=set)
    # What waits for it and what it works on.
    line: Line = field(default_factory=Line)
    batch_size: int = 1  # requests that one of its workers takes at once
    metadata: dict[str, Any] = field(default_factory=dict)  # what its worker told of it for /v2
    # What is being done to it: its load, or its worker's restart. Whoever unloads it cancels that.
    work: asyncio.Task[None] | None = None
    changed: Callable[[Model], None] = lambda model: None  # is told, too
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def engine_name(self) -> str:
        """Unlike any other load's, so that a new version can load beside the old one."""
        return f"{self.name}#{self.id}"

    @property
    def request_timeout_s(self) -> float:
        """How long an answer may take."""
        return float(self.settings.timeout_s or self.options["response_timeout"])

    def set(self, state: State | None = None) -> None:
        if state is not None:
            self.state = state
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self.changed(self)

    async def change(self) -> None:
        await self._changed.wait()


def no_room_yet(shortage: ServiceError, waited_s: float) -> Unavailable:
    """For a request or load whose time is over before others have made room."""
    return Unavailable(f"no room within {waited_s:g} s: {shortage.message}")
