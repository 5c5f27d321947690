"""Brings models back that Multi Model Server, the engine or the gateway itself has lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter

from common.errors import EngineUnavailable, OutOfMemory, ServiceError
from serving.errors import InsufficientStorage, ModelNotFound, ServingError, Unavailable
from serving.mms.workers import Workers
from serving.models.model import Model, State
from serving.models.registry import Registry
from serving.models.snapshot import Snapshot
from serving.settings import Settings

logger = logging.getLogger(__name__)

LOOK_S = 1.0
# Multi Model Server lets requests wait for a worker that has ended: while there are some, one is
# missed sooner.
GLANCE_S = 0.1
WAIT_S = 0.1
# Where the engine does not hold a model for so many looks in a row, it has been started again. A
# request in flight may be loading the model: it is given longer.
LOOKS, LOOKS_IN_USE = 3, 20
# Between the restarts of a worker. One that stayed for STEADY_S is started again at once.
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
STEADY_S = 60.0
# A request waits for a restart that is as near as this.
WORTH_WAITING_S = 2.0


class Recovery:
    """Compares what `registry` has with what there is."""

    def __init__(
        self, settings: Settings, registry: Registry, workers: Workers, snapshot: Snapshot
    ) -> None:
        self._settings = settings
        self._registry, self._workers, self._snapshot = registry, workers, snapshot
        self._missed: Counter[str] = Counter()  # by id: how often in a row the engine lacked it
        self._ending: set[str] = set()  # ids of no model
        self._blind = ""  # why the last look saw nothing

    def takes_over(self) -> bool:
        """Whether a gateway before this one had models, and so the rest of the server runs."""
        return self._snapshot.exists()

    async def adopt(self) -> None:
        """Takes over what the gateway before this one had loaded, and ends what it had not."""
        for model in self._snapshot.read():
            try:
                await self._registry.adopt(model)
            except (ServingError, OSError) as error:
                logger.error("model %s is lost: %s", model.name, error)
        with contextlib.suppress(ServingError):
            self._end_strangers(await self._workers.registered())
        await asyncio.to_thread(
            self._workers.remove_other_folders, {model.id for model in self._registry.all()}
        )

    async def watch(self) -> None:
        """Runs for ever: gives models their workers back."""
        while True:
            try:
                for _ in range(round(LOOK_S / GLANCE_S)):
                    await asyncio.sleep(GLANCE_S)
                    await self._glance()
                self._snapshot.retry()
                await self._look()
                self._blind = ""
            except (ServiceError, OSError, RuntimeError) as error:  # no file, no thread to be had
                if str(error) != self._blind:
                    logger.warning("the models' workers are not looked after: %s", error)
                self._blind = str(error)

    async def _glance(self) -> None:
        """At those that have requests and are due, and their sockets alone."""
        now = time.monotonic()
        used = [m for m in self._registry.all() if m.in_flight and now >= m.restarts.next_at]
        listening = await self._workers.listening() if used else set()
        for model in used:
            if model.state is not State.READY or model.restoring or model.socket in listening:
                continue
            if not await self._is_there(model) and not model.restoring:
                return  # Multi Model Server does not answer

    async def _look(self) -> None:
        # What is asked for below is out of date for a worker that has been started meanwhile.
        seen = [(model, model.starts) for model in self._registry.all()]
        registered = await self._workers.registered()
        held = await self._workers.held_by_engine()
        for model, _ in seen:
            model.residency = held.get(model.engine_name, "")
        lacking = (m.id for m, _ in seen if m.in_engine and m.engine_name not in held)
        self._missed = Counter({id: self._missed[id] + 1 for id in lacking})
        listening = await self._workers.listening()
        for model, starts in seen:
            if model.starts == starts and self._is_lost(model, registered, listening):
                self._restore(model, registered, listening)
        self._end_strangers(registered)
        await asyncio.to_thread(self._workers.remove_leftovers)

    async def _is_there(self, model: Model) -> bool:
        """Whether it has its worker. One that is lost is started again, if it is due."""
        starts = model.starts
        try:
            registered = {model.id} if await self._workers.is_registered(model.id) else set()
        except ServingError:
            return False
        listening = await self._workers.listening()
        if model.starts != starts or model.restoring:
            return not model.restoring
        if not self._is_lost(model, registered, listening):
            return True
        self._restore(model, registered, listening)
        return False

    def _is_lost(self, model: Model, registered: set[str], listening: set[str]) -> bool:
        draining = model.state is State.DRAINING and model.in_flight > 0  # those are answered, too
        if model.restoring or not (model.state is State.READY or draining):
            return False
        if model.id not in registered or model.socket not in listening:
            return True
        return self._missed[model.id] >= (LOOKS_IN_USE if model.in_flight else LOOKS)

    def _end_strangers(self, registered: set[str]) -> None:
        """The workers that belong to no model, such as a killed gateway's. Nobody waits for their
        end: Multi Model Server ends one that is starting when it has started."""
        for id in registered - {model.id for model in self._registry.all()} - self._ending:
            self._ending.add(id)
            self._registry.spawn(self._end_stranger(id))

    async def _end_stranger(self, id: str) -> None:
        try:
            await self._workers.unregister(id)
        finally:
            self._ending.discard(id)

    def _restore(self, model: Model, registered: set[str], listening: set[str]) -> None:
        """Unless it has failed so often that it is not due yet. What has died with Multi Model
        Server or the engine has not failed: those are started again ever later themselves."""
        restarts, now = model.restarts, time.monotonic()
        died = model.id in registered and model.socket not in listening
        own = died or bool(restarts.reason)
        if own and now < restarts.next_at:
            return
        # What ended while it was not due has not stayed.
        if now - max(restarts.back_at, restarts.next_at) > STEADY_S:
            restarts.failures = 0
        model.restoring = True
        model.work = self._registry.spawn(self._start_again(model, own))

    async def _start_again(self, model: Model, own: bool) -> None:
        """`own`: it was the worker itself that had ended."""
        restarts = model.restarts
        try:
            async with self._workers.turn:
                with contextlib.suppress(ServingError):
                    await self._workers.unregister(model.id)
                for scope in model.asked:
                    scope.cancel()
                limit_s = self._settings.load_timeout_s
                await asyncio.wait_for(self._workers.start(model), limit_s)
            model.starts += 1
            del self._missed[model.id]
            logger.info("model %s is back", model.name)
            restarts.back_at, restarts.reason = time.monotonic(), ""
            if own:
                self._back_off(model)
            self._registry.save()  # its socket is another one
        except (Unavailable, EngineUnavailable) as error:  # which is not the model's fault
            logger.error("model %s did not come back yet: %s", model.name, error.message)
        except Exception as error:
            await self._failed(model, error)
        finally:
            model.restoring, model.work = False, None
            model.set()

    async def _failed(self, model: Model, error: Exception) -> None:
        restarts = model.restarts
        restarts.back_at, restarts.reason = math.inf, "it did not start in time"
        if isinstance(error, ServiceError):
            restarts.reason = error.message
        elif not isinstance(error, asyncio.TimeoutError):
            restarts.reason = "an error inside the server; the log has it"
            logger.error("model %s was not started again", model.name, exc_info=error)
        delay_s = self._back_off(model)
        logger.error(
            "model %s did not come back: %s; tried again in %.0f s",
            model.name, restarts.reason, delay_s,
        )  # fmt: skip
        with contextlib.suppress(ServingError):
            await self._workers.unregister(model.id)
        if isinstance(error, InsufficientStorage | OutOfMemory) and not model.settings.pinned:
            self._registry.spawn(self._drop(model))

    @staticmethod
    def _back_off(model: Model) -> float:
        """Counts a restart; returns after how long there may be another."""
        delay_s = BACK_OFF_S[min(model.restarts.failures, len(BACK_OFF_S) - 1)]
        model.restarts.failures += 1
        model.restarts.next_at = time.monotonic() + delay_s
        return delay_s

    async def _drop(self, model: Model) -> None:
        """Unloads a model whose memory others have taken while the engine was away."""
        if self._registry.find(model.name) is model:
            with contextlib.suppress(ModelNotFound):
                await self._registry.unload(model.name)

    async def wait_for(self, model: Model, timeout_s: float) -> None:
        """After a request was told that the worker is lost: until it is back, or `Unavailable`."""
        end = time.monotonic() + timeout_s
        retry_s = 1.0
        while (left_s := end - time.monotonic()) > 0 and self._registry.find(model.name) is model:
            if model.restoring:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(model.change(), left_s)
                continue
            retry_s = max(model.restarts.next_at - time.monotonic(), 1.0)
            if model.restarts.reason and retry_s > min(left_s, WORTH_WAITING_S):
                break
            if await self._is_there(model):
                return
            if model.restoring:
                continue
            await asyncio.sleep(WAIT_S)
        raise Unavailable(f"Model {model.name} is being loaded again", retry_after_s=retry_s)
