"""The handler for a model that brings its own script, on the worker's side.

Script code never runs in the worker: it has processes for that, which may die.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.errors import EngineError
from common.settings import read_settings
from common.trees import remove
from handlers.model_spec import ModelSpec
from handlers.settings import Settings
from handlers.user_code.confinement.rules import Confinement, OwnUser
from handlers.user_code.entry_point import Script
from handlers.user_code.messages import Answer, Request
from handlers.user_code.pool import ScriptPool
from handlers.user_code.process import ScriptProcess
from handlers.user_code.requirements import PACKAGES, TEMPORARY, install


class ScriptHandler:
    """Answers whole batches: a script of Multi Model Server's kind gets them as they are."""

    # Also where the script uses a model in the engine: its process keeps that there by itself, and
    # what the engine streams would go past the script.
    IN_ENGINE = False

    def __init__(self, script: Script) -> None:
        self._script = script
        self._settings = read_settings(Settings)
        self._pool: ScriptPool | None = None

    def load(self, spec: ModelSpec) -> None:
        """Raises `EngineError` with the reason why the model does not load."""
        settings = self._settings
        temporary = Path(spec.folder) / TEMPORARY
        remove(temporary)  # another worker's of the same model
        temporary.mkdir(mode=0o700)
        confinement = self._confinement(spec, temporary) if settings.script_isolation else None
        packages = install(self._script, spec, settings, confinement)
        script_spec = self._script.spec(spec.name, settings.max_answer_bytes) | {
            "packages": packages,
            "engine_name": spec.engine_name,
            "gpu_id": spec.gpu_id,
            "batch_size": spec.batch_size,
            "memory_mib": settings.script_memory_mib,
            "temporary": str(temporary),
            "confinement": confinement and asdict(confinement),
        }
        make = functools.partial(ScriptProcess, spec.name, script_spec, settings.load_timeout_s)
        pool = ScriptPool(make)
        pool.load()
        self._pool = pool

    def _confinement(self, spec: ModelSpec, temporary: Path) -> Confinement:
        """With a user of this model's own, where it can have one."""
        settings = self._settings
        self._user = OwnUser(os.environ.get("RUN_DIR", spec.folder))  # as long as this worker lives
        if self._user.uid is not None:
            os.chown(temporary, self._user.uid, self._user.uid)
        more = filter(None, settings.script_paths.split(":"))
        return Confinement(
            read=[str(self._script.root), str(Path(spec.folder) / PACKAGES), *more],
            write=[str(temporary)],
            network=settings.script_network,
            uid=self._user.uid,
        )

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
