"""Starts the processes that run a model's own script.

The script's code never runs in the worker: a process of its own may crash or hang.
"""

from __future__ import annotations

import functools
import os
from dataclasses import asdict
from pathlib import Path

from common.trees import remove
from handlers.model_spec import ModelSpec
from handlers.settings import Settings
from handlers.user_code.confinement.rules import Confinement, allocate_user
from handlers.user_code.entry_point import Script
from handlers.user_code.pool import ScriptPool
from handlers.user_code.process import ScriptProcess
from handlers.user_code.requirements import PACKAGES, TEMPORARY, install


def launch(script: Script, spec: ModelSpec, settings: Settings) -> ScriptPool:
    """Load the script in a first process. Raises `EngineError` with the reason if that fails."""
    temporary = Path(spec.folder) / TEMPORARY
    remove(temporary)  # left by an earlier worker of the same model
    temporary.mkdir(mode=0o700)
    confinement = None
    if settings.script_isolation:
        uid = allocate_user(os.environ.get("RUN_DIR", spec.folder))
        if uid is not None:
            os.chown(temporary, uid, uid)
        shared = filter(None, settings.script_paths.split(":"))
        read = [str(script.root), str(Path(spec.folder) / PACKAGES), *shared]
        confinement = Confinement(
            read,
            [str(temporary)],
            settings.script_network,
            uid,
            shared_memory=not settings.script_memory_mib,
        )
    script_spec = script.spec(spec.name) | {
        "packages": install(script, spec, settings, confinement),
        "engine_name": spec.engine_name,
        "gpu_id": spec.gpu_id,
        "batch_size": spec.batch_size,
        "memory_mib": settings.script_memory_mib,
        "temporary": str(temporary),
        "confinement": confinement and asdict(confinement),
    }
    pool = ScriptPool(
        functools.partial(ScriptProcess, spec.name, script_spec, settings.load_timeout_s)
    )
    pool.load()
    return pool
