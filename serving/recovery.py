"""Brings models back that Multi Model Server, the engine or the gateway itself has lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter

from engine.errors import EngineError, OutOfMemory
from serving.errors import ModelNotFound, NoRoom, ServingError, Unavailable
from serving.model import Model, State
from serving.models import Registry
from serving.saved import SavedModels
from serving.workers import Workers

logger = logging.getLogger(__name__)

LOOK_S = 1.0
WAIT_S = 0.1
# Where the engine does not hold a model for so many looks in a row, it has been started again. A
# request in flight may be loading the model: it is given longer.
LOOKS, LOOKS_IN_USE = 3, 20


class Recovery:
    """Compares what `registry` has with what there is."""

    def __init__(self, registry: Registry, workers: Workers, saved: SavedModels) -> None:
        self._registry, self._workers, self._saved = registry, workers, saved
        self._missed: Counter[str] = Counter()  # by id: how often in a row the engine lacked it

    async def adopt(self) -> None:
        """Takes over what the gateway before this one had loaded, and ends what it had not."""
        for model in self._saved.read():
            try:
                await self._registry.adopt(model)
            except ServingError as error:
                logger.error("model %s is lost: %s", model.name, error.message)
        with contextlib.suppress(ServingError, ValueError):
            await self._end_strangers(await self._workers.registered())

    async def watch(self) -> None:
        """Runs for ever: gives models their workers back."""
        while True:
            await asyncio.sleep(LOOK_S)
            models = self._registry.all()
            try:
                registered = await self._workers.registered()
                held = await self._workers.held_by_engine()
            except (ServingError, EngineError, ValueError):
                continue
            lacking = (m.id for m in models if m.in_engine and m.engine_name not in held)
            self._missed = Counter({id: self._missed[id] + 1 for id in lacking})
            listening = self._workers.listening()
            for model in models:
                if self._is_lost(model, registered, listening):
                    self._restore(model)
            with contextlib.suppress(ServingError):
                await self._end_strangers(registered)
            await asyncio.to_thread(self._workers.remove_unused_sockets)

    def _is_lost(self, model: Model, registered: set[str], listening: set[str]) -> bool:
        draining = model.state is State.DRAINING and model.in_flight > 0  # those are answered, too
        if model.restoring or not (model.state is State.READY or draining):
            return False
        if model.id not in registered or model.socket not in listening:
            return True
        return self._missed[model.id] >= (LOOKS_IN_USE if model.in_flight else LOOKS)

    async def _end_strangers(self, registered: set[str]) -> None:
        """Ends the workers that belong to no model, such as a killed gateway's."""
        for id in registered - {model.id for model in self._registry.all()}:
            await self._workers.unregister(id)

    def _restore(self, model: Model) -> None:
        model.restoring = True  # from now on: no unload comes in between
        self._registry.spawn(self._start_again(model))

    async def _start_again(self, model: Model) -> None:
        try:
            async with self._workers.turn:
                with contextlib.suppress(ServingError):
                    await self._workers.unregister(model.id)
                lost, model.lost = model.lost, asyncio.Event()
                lost.set()
                await self._workers.start(model)
            del self._missed[model.id]
            logger.info("model %s is back", model.name)
        except (ServingError, EngineError) as error:
            logger.error("model %s did not come back yet: %s", model.name, error.message)
            with contextlib.suppress(ServingError):
                await self._workers.unregister(model.id)
            if isinstance(error, NoRoom | OutOfMemory):
                self._registry.spawn(self._drop(model))
        finally:
            model.restoring = False
            model.set()

    async def _drop(self, model: Model) -> None:
        """Unloads a model whose memory others have taken while the engine was away."""
        if self._registry.find(model.name) is model:
            with contextlib.suppress(ModelNotFound):
                await self._registry.unload(model.name)

    async def wait_for(self, model: Model, timeout_s: float) -> None:
        """After a request was told that the worker is lost: until it is back, or `Unavailable`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._registry.find(model.name) is model:
            with contextlib.suppress(ServingError, ValueError):
                registered = {model.id} if await self._workers.is_registered(model.id) else set()
                if self._is_lost(model, registered, self._workers.listening()):
                    self._restore(model)
                elif not model.restoring:
                    return
            await asyncio.sleep(WAIT_S)
        raise Unavailable(f"Model {model.name} is being loaded again", retry_after_s=1)
