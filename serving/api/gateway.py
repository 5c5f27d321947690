"""The gateway's state: everything that the routes of all contracts need."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from anyio import move_on_after

from engine.http.async_client import AsyncEngineClient
from serving.aliases import Aliases
from serving.api.metrics import Metrics
from serving.console.journal import Journal
from serving.errors import ModelNotFound, StillLoading, Unavailable
from serving.mms.client import MMSClient
from serving.models.admission import Admission
from serving.models.model import Model
from serving.models.on_demand import OnDemand
from serving.models.recovery import Recovery
from serving.models.registry import Registry
from serving.settings import Settings
from serving.store import Lookups
from serving.tokens import Tokens, current


@dataclass
class Gateway:
    """The parts of the gateway, and whether it takes requests."""

    settings: Settings
    registry: Registry
    on_demand: OnDemand
    recovery: Recovery
    mms: MMSClient
    engine: AsyncEngineClient
    lookups: Lookups
    metrics: Metrics
    journal: Journal
    admission: Admission = field(default_factory=Admission)
    single_model: str | None = None
    tokens: Tokens = field(default_factory=lambda: Tokens(""))
    aliases: Aliases = field(default_factory=Aliases)
    healthy: bool = False
    adopted: bool = False  # the models that a previous gateway process had loaded are registered
    started: bool = False  # the models to load at the start are loaded
    start_error: str | None = None  # why a single-model server's model did not load
    draining: bool = False
    drain_end: float = math.inf  # by time.monotonic(), once it drains
    takes_over: bool = False  # replaces a gateway process that ended; requests wait for its start
    started_or_stopping: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # set once it drains
    requests: int = 0  # in flight
    body_bytes: int = 0  # bodies of requests in memory
    # Places for lines of batches, by model, while a batch of the model is answered.
    line_places: WeakValueDictionary[str, asyncio.Semaphore] = field(
        default_factory=WeakValueDictionary
    )
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def take_over(self, timeout_s: float) -> None:
        """Wait, `timeout_s` at most, until the models of a previous gateway process are loaded."""
        if self.takes_over and not self.started:
            with move_on_after(timeout_s):
                await self.started_or_stopping.wait()

    def check_ready(self) -> None:
        """Raise `Unavailable` while the server starts or drains, when no route takes requests."""
        if self.draining:
            raise Unavailable("the server is stopping", retry_after_s=5)
        if self.start_error is not None:
            raise Unavailable(f"the model did not load: {self.start_error}")
        if not self.adopted:
            raise Unavailable("the server is starting")
        if not self.started:
            raise StillLoading("models are being loaded")

    def check_health(self) -> None:
        """Raise `Unavailable` if a new request would not be answered now.

        It is for health checks only: requests wait for a process that restarts.
        """
        self.check_ready()
        if not self.healthy:
            raise Unavailable("a process of the server is being restarted")

    async def find(self, name: str) -> Model | None:
        """Return a registered model, None for one that a call loads. Raises `ModelNotFound`."""
        model = self.registry.find(name)
        if model is None:
            if self.settings.sagemaker_multi_model:
                raise ModelNotFound(f"Model not found: {name}")
            if self.registry.request(name) is None:
                await self.lookups.find(name)
        return model

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """Hold a model for one request, loaded on demand unless SageMaker manages the loads.

        Raises `Forbidden` for a model that needs a base which the request's token may not use.
        """
        managed = self.settings.sagemaker_multi_model
        async with (self.registry if managed else self.on_demand).use(name) as model:
            token = current.get()
            if token is not None and model.needs_base and model.stored_base is not None:
                token.check_base(model.stored_base.name)
            yield model
