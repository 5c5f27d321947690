"""Restarts models' workers that Multi Model Server, the engine or the gateway has lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter

from common.errors import EngineUnavailable, OutOfMemory, ServiceError
from serving.errors import InsufficientStorage, ServingError, Unavailable, explained
from serving.mms.workers import Workers
from serving.models.model import Model, State
from serving.models.registry import Registry
from serving.models.snapshot import Snapshot
from serving.settings import Settings

logger = logging.getLogger(__name__)

POLL_S = 1.0  # between polls of MMS and the engine
# Between polls of the sockets of models in use: MMS does not answer requests to an exited worker.
# Longer: these requests are retried later.
SOCKET_POLL_S = 0.1
WAIT_S = 0.1  # between polls by a request that waits for a restart
# Polls in a row without a model in the engine after which its worker is restarted. More for a model
# in use, as its request may be loading it. Fewer: a model that is just loading is restarted.
MISSING_POLLS, MISSING_POLLS_IN_USE = 3, 20
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # between restarts of a worker
STEADY_S = 60.0  # after a worker ran this long, its back-off starts from the shortest again
MAX_RESTART_WAIT_S = 2.0  # requests wait for a restart only if it begins within this time


class Recovery:
    """Compares the models of `registry` with MMS, the engine and the workers' sockets."""

    def __init__(
        self, settings: Settings, registry: Registry, workers: Workers, snapshot: Snapshot
    ) -> None:
        self._settings = settings
        self._registry, self._workers, self._snapshot = registry, workers, snapshot
        self._missed = Counter[str]()  # polls in a row without the model in the engine, by id
        self._ending: set[str] = set()  # ids of unknown workers
        self._poll_error = ""  # error of the last poll, to log a repeated one once
        self.adopted = asyncio.Event()

    async def adopt(self) -> None:
        """Take over the models of an earlier gateway, and end workers without a model."""
        models, requests = self._snapshot.read()
        for name, request in requests.items():
            self._registry.remember(name, request)
        for model in models:
            try:
                await self._registry.adopt(model)
            except (ServingError, OSError) as error:
                logger.error("model %s is lost: %s", model.name, error)
        with contextlib.suppress(ServingError):
            self._end_unknown(await self._workers.registered())
        await asyncio.to_thread(
            self._workers.remove_other_folders, {model.id for model in self._registry.all()}
        )
        self.adopted.set()

    async def watch(self) -> None:
        """Restart lost workers until it is cancelled; begin after `adopt`.

        Before, Multi Model Server and the engine may not have started, and models that are still to
        be adopted have workers.
        """
        await self.adopted.wait()
        while True:
            try:
                for _ in range(round(POLL_S / SOCKET_POLL_S)):
                    await asyncio.sleep(SOCKET_POLL_S)
                    await self._poll_sockets()
                await self._snapshot.retry()
                await self._poll()
                self._poll_error = ""
            # OSError and RuntimeError: there are too many open files or threads.
            except (ServiceError, OSError, RuntimeError) as error:
                if str(error) != self._poll_error:
                    logger.warning("the models' workers cannot be polled: %s", error)
                self._poll_error = str(error)

    async def _poll_sockets(self) -> None:
        """Restart workers that do not listen, if their models have requests and no back-off."""
        now = time.monotonic()
        used = [m for m in self._registry.all() if m.in_flight and now >= m.restarts.next_at]
        listening = await self._workers.listening() if used else set()
        for model in used:
            if model.state is not State.READY or model.restoring or model.socket in listening:
                continue
            if not await self._is_there(model) and not model.restoring:
                return  # Multi Model Server does not answer

    async def _poll(self) -> None:
        # A changed `starts` marks a worker started meanwhile: the answers below are stale for it.
        seen = [(model, model.starts) for model in self._registry.all()]
        registered = await self._workers.registered()
        held = await self._workers.held_by_engine()
        for model, _ in seen:
            state = held.get(model.engine_name)
            model.residency = "" if state is None else state.residency
            if state is not None and model.base is not None:
                model.whole_because = state.whole_because  # a restarted engine loaded it again
        lacking = (m.id for m, _ in seen if m.in_engine and m.engine_name not in held)
        self._missed = Counter({id: self._missed[id] + 1 for id in lacking})
        listening = await self._workers.listening()
        for model, starts in seen:
            if model.starts == starts and self._is_lost(model, registered, listening):
                self._restore(model, registered, listening)
        self._end_unknown(registered)
        await asyncio.to_thread(self._workers.remove_leftovers)

    async def _is_there(self, model: Model) -> bool:
        """Return whether a model's worker runs. Begins the restart of a lost one."""
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
        # A draining model needs its worker for the requests in flight.
        needed = model.state is State.READY or (
            model.state is State.DRAINING and model.in_flight > 0
        )
        if model.restoring or not needed:
            return False
        if model.id not in registered or model.socket not in listening:
            return True
        limit = MISSING_POLLS_IN_USE if model.in_flight else MISSING_POLLS
        return self._missed[model.id] >= limit

    def _end_unknown(self, registered: set[str]) -> None:
        """End workers without a model, such as a killed gateway's, in the background.

        Multi Model Server ends a starting worker only after its start.
        """
        for id in registered - {model.id for model in self._registry.all()} - self._ending:
            self._ending.add(id)
            self._registry.spawn(self._end_worker(id))

    async def _end_worker(self, id: str) -> None:
        try:
            await self._workers.unregister(id)
        finally:
            self._ending.discard(id)

    def _restore(self, model: Model, registered: set[str], listening: set[str]) -> None:
        """Begins the restart of a lost worker in the background, unless it is in back-off.

        There is no back-off for workers that ended with Multi Model Server or the engine: the
        supervisor has one for these processes.
        """
        restarts, now = model.restarts, time.monotonic()
        died = model.id in registered and model.socket not in listening
        own = died or bool(restarts.reason)
        if own and now < restarts.next_at:
            return
        # Time within a back-off does not count as steady.
        if now - max(restarts.back_at, restarts.next_at) > STEADY_S:
            restarts.failures = 0
        model.restoring = True
        model.work = self._registry.spawn(self._start_again(model, own))

    async def _start_again(self, model: Model, own: bool) -> None:
        """Restart a worker. `own`: it did not end with MMS or the engine; a back-off follows."""
        restarts = model.restarts
        try:
            async with self._workers.turn:
                with contextlib.suppress(ServingError):
                    await self._workers.unregister(model.id)
                for scope in model.pending:
                    scope.cancel()
                limit_s = self._settings.load_timeout_s
                await asyncio.wait_for(self._workers.start(model), limit_s)
            model.starts += 1
            del self._missed[model.id]
            logger.info("model %s is back", model.name)
            restarts.back_at, restarts.reason = time.monotonic(), ""
            if own:
                self._back_off(model)
            await self._registry.save()  # it has a new socket
        except (Unavailable, EngineUnavailable) as error:  # the model is not at fault: no back-off
            logger.error("model %s did not come back yet: %s", model.name, error.message)
        except Exception as error:
            await self._failed(model, error)
        finally:
            model.restoring, model.work = False, None
            model.set()

    async def _failed(self, model: Model, error: Exception) -> None:
        restarts = model.restarts
        limit_s = self._settings.load_timeout_s
        restarts.back_at = math.inf
        restarts.reason = explained(error)
        if isinstance(error, asyncio.TimeoutError):
            restarts.reason = f"it did not start within {limit_s} s (LOAD_TIMEOUT_S)"
        elif not isinstance(error, ServiceError):
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
        """Count a restart and begin the back-off before the next; return it in seconds."""
        delay_s = BACK_OFF_S[min(model.restarts.failures, len(BACK_OFF_S) - 1)]
        model.restarts.failures += 1
        model.restarts.next_at = time.monotonic() + delay_s
        return delay_s

    async def _drop(self, model: Model) -> None:
        """Unload a model whose memory others took during the engine's restart."""
        if model.state is State.READY:
            await self._registry.drain(model)

    async def wait_for(self, model: Model, timeout_s: float) -> None:
        """Wait until a lost worker runs again. Raises `Unavailable` if that takes too long."""
        end = time.monotonic() + timeout_s
        retry_s = 1.0
        while (left_s := end - time.monotonic()) > 0 and model in self._registry.all():
            if model.restoring:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(model.change(), left_s)
                continue
            retry_s = max(model.restarts.next_at - time.monotonic(), 1.0)
            if model.restarts.reason and retry_s > min(left_s, MAX_RESTART_WAIT_S):
                break
            if await self._is_there(model):
                return
            if model.restoring:
                continue
            await asyncio.sleep(WAIT_S)
        raise Unavailable(f"Model {model.name} is being loaded again", retry_after_s=retry_s)
