"""The handler for a model that brings its own script, on the worker's side.

Script code never runs in the worker: it has processes for that, which may die.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from engine.errors import EngineError
from handlers.scripts.find import Script
from handlers.scripts.messages import Answer, Request
from handlers.scripts.pool import ScriptPool
from handlers.scripts.process import ScriptProcess
from handlers.scripts.requirements import install
from handlers.settings import Settings
from handlers.slot import Slot


class ScriptHandler:
    """Answers whole batches: a script of Multi Model Server's kind gets them as they are."""

    # Also where the script uses a model in the engine: its process keeps that there by itself, and
    # what the engine streams would go past the script.
    IN_ENGINE = False

    def __init__(self, script: Script) -> None:
        self._script = script
        self._settings = Settings.from_environment()
        self._pool: ScriptPool | None = None

    def load(self, slot: Slot) -> None:
        """Raises `EngineError` with the reason why the model does not load."""
        settings = self._settings
        packages = install(self._script, slot, settings)
        orders = self._script.orders(slot.name, settings.max_answer_bytes) | {
            "packages": packages,
            "engine_name": slot.engine_name,
            "gpu_id": slot.gpu_id,
            "batch_size": slot.batch_size,
            "memory_mib": settings.script_memory_mib,
        }
        make = functools.partial(ScriptProcess, slot.name, orders, settings.load_timeout_s)
        pool = ScriptPool(make)
        pool.load()
        self._pool = pool

    def answer(
        self, requests: Sequence[Request], timeout_s: float | None
    ) -> Sequence[Answer | EngineError]:
        """One for each request. Raises what is wrong with all of them."""
        assert self._pool is not None
        return self._pool.ask(requests, timeout_s or self._settings.request_timeout_s)

    def connected(self) -> None:
        if self._pool is not None:
            self._pool.connected()

    def disconnected(self) -> None:
        if self._pool is not None:
            self._pool.disconnected()
