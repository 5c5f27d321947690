"""The record of a model in the registry: its state, files, settings, queue and worker."""

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
from serving.store import Fetched, Stop, StoredModel

LOAD_S = 0.3  # assumed duration of a load in the engine, and of a load not measured yet


class State(enum.Enum):
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class Restarts:
    """Restarts of a model's worker, and the time of the next one."""

    failures: int = 0  # restarts without STEADY_S of work in between; they set the back-off
    next_at: float = 0.0  # end of the back-off, on the monotonic clock
    back_at: float = 0.0  # end of the last successful restart; inf after a failed one
    reason: str = ""  # the error of the last restart; empty if it succeeded


CLASSIFIER = "kogpt2_classifier"  # a platform of /v2: `handlers.text.classifier_v2`


@dataclass(frozen=True)
class LoadRequest:
    """A request to load a model: `url` or the name in the store, settings, and worker options."""

    url: str
    settings: ModelSettings = field(default_factory=ModelSettings)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Model:
    """A model that is loading, loaded or draining."""

    name: str
    url: str
    id: str  # name in MMS
    stored: StoredModel
    options: Mapping[str, Any]  # of the load request, for the worker
    # Of the load request; after the fetch, also those of the model's serving.json.
    settings: ModelSettings = field(default_factory=ModelSettings)
    state: State = State.FETCHING
    fetched: Fetched | None = None
    fetching: Stop = field(default_factory=Stop)  # stops the fetch
    stored_base: StoredModel | None = None  # of an adapter or a delta
    base: Fetched | None = None  # the fetched `stored_base`
    is_adapter: bool = False
    is_delta: bool = False  # a folder with a delta in place of weights
    whole_because: str = ""  # why a model that has or names a base is served whole
    in_flight: int = 0
    last_used: float = field(default_factory=lambda: time.monotonic())
    last_shared: float = field(default_factory=lambda: time.monotonic())  # by concurrent requests
    restoring: bool = False  # the worker is being restarted
    restarts: Restarts = field(default_factory=Restarts)
    starts: int = 0  # starts of the worker; a changed number makes earlier observations stale
    load_s: float = LOAD_S  # duration of the last load, without the fetch
    in_engine: bool = True  # the engine computes the model; otherwise its worker does
    residency: str = ""  # hot or parked, at the last poll of the engine
    socket: str = ""  # path of the socket on which the worker listens for MMS
    connections: int = 1  # number of MMS's connections to the worker, if `in_engine`
    error: Exception | None = None
    shortage: ServiceError | None = None  # why the load waits: too little memory or disk
    # Scopes of requests at the worker. Its restart cancels them; the requests are then retried.
    pending: set[CancelScope] = field(default_factory=set)
    line: Line = field(default_factory=Line)
    batch_size: int = 1  # maximum number of requests in one call of the worker
    metadata: dict[str, Any] = field(default_factory=dict)  # from the worker, for /v2
    warnings: list[str] = field(default_factory=list)  # about the model's files
    loading: asyncio.Task[Model] | None = None  # the task of `Registry.load` or `replace`
    replaces: Model | None = None  # another version, which answers until this one is ready
    # The task of the running load or restart; unloading cancels it.
    work: asyncio.Task[None] | None = None
    changed: Callable[[Model], None] = lambda model: None  # called by `set`
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def engine_name(self) -> str:
        """The name in the engine, unique per load: a new version can load while the old drains."""
        return f"{self.name}#{self.id}"

    @property
    def needs_base(self) -> bool:
        """Whether it is not served without its base, and not to tokens that may not use the base.

        An adapter, a folder with a delta, and a whole model whose settings name the base.
        """
        return self.is_adapter or self.is_delta or self.settings.base is not None

    @property
    def shared_base(self) -> StoredModel | None:
        """The base of an adapter, or of a fine-tune that shares its memory and steps."""
        return self.stored_base if self.is_adapter or not self.whole_because else None

    @property
    def version(self) -> str:
        """The model's version, as the `/v2` routes show it."""
        return str((self.metadata.get("versions") or ["1"])[0])

    @property
    def task(self) -> str:
        """What a classifier of the engine does, as transformers calls it; "" for other models."""
        if self.metadata.get("platform") != CLASSIFIER:
            return ""
        outputs = [output["name"] for output in self.metadata["outputs"]]
        return "token-classification" if "entities" in outputs else "text-classification"

    @property
    def request_timeout_s(self) -> float:
        """The time limit of a request to the model, in seconds."""
        return float(self.settings.timeout_s or self.options["response_timeout"])

    def set(self, state: State | None = None) -> None:
        """Set the state, if given, wake tasks in `change`, and call `changed`."""
        if state is not None:
            self.state = state
        event, self._changed = self._changed, asyncio.Event()
        event.set()
        self.changed(self)

    async def change(self) -> None:
        """Wait for the next call of `set`."""
        await self._changed.wait()


def eviction_timeout(shortage: ServiceError, waited_s: float) -> Unavailable:
    """Return the error of a request or load that timed out while it waited for evictions."""
    return Unavailable(f"no memory or disk became free within {waited_s:g} s: {shortage.message}")
