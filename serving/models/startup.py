"""Starts a gateway: waits for MMS and the engine, adopts and preloads models, watches health."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from common.errors import ServiceError
from common.model_files import visible
from common.settings import comma_separated
from serving.api.gateway import Gateway
from serving.api.naming import described_models
from serving.errors import Conflict, ServingError, explained
from serving.models.model import LoadRequest
from serving.names import normal_name

logger = logging.getLogger(__name__)

HEALTH_S = 0.5  # between health checks
# Calls after a start of MMS, for Java to compile its code. They take 0.2 s and save the first
# requests 2 ms each.
WARM_UP_CALLS = 200
PRELOADS_AT_ONCE = 8  # so that some models are fetched while others start


async def watch_health(gateway: Gateway) -> None:
    """Update `gateway.healthy`, which `/ping` reads, until it is cancelled."""
    warm = gateway.takes_over  # only this gateway was restarted: MMS is warm already
    while True:
        try:
            for _ in range(1 if warm else WARM_UP_CALLS):
                await gateway.mms.call("GET", "/ping", timeout_s=2)
            warm = True
            gateway.healthy = await gateway.engine.is_healthy()
        except (ServingError, OSError, RuntimeError):  # the last two: too many files or threads
            gateway.healthy = warm = False
        await asyncio.sleep(HEALTH_S)


async def start(gateway: Gateway) -> None:
    """Adopt and preload models once MMS and the engine answer."""
    while not gateway.healthy:
        await asyncio.sleep(0.05)
    await gateway.recovery.adopt()
    await gateway.aliases.ready.wait()
    gateway.adopted = True
    await _preload(gateway)
    gateway.started = True
    gateway.started_or_stopping.set()


async def _preload(gateway: Gateway) -> None:
    """Load PRELOAD_MODELS, each within LOAD_TIMEOUT_S, and the model of a single-model server.

    A failed preload is logged; without its single model the server does not start.
    """
    settings = gateway.settings
    single = Path(settings.base_dir) / "model"
    if not settings.sagemaker_multi_model and _is_filled(single):
        name = gateway.single_model = normal_name(settings.single_model_name)
        try:
            stored = await gateway.lookups.locate(str(single))
            await asyncio.shield(gateway.registry.load(name, LoadRequest(str(single)), stored))
        except Conflict:  # adopted from an earlier gateway
            pass
        except Exception as error:
            gateway.start_error = _explained(name, error)
    turn = asyncio.Semaphore(PRELOADS_AT_ONCE)

    async def preload(name: str) -> None:
        async with turn:
            try:
                await gateway.on_demand.preload(name)
            except Exception as error:
                logger.error("model %s is not preloaded: %s", name, _explained(name, error))

    names = comma_separated(settings.preload_models)
    models = {m: None for n in names for m in described_models(gateway, normal_name(n))}
    await asyncio.gather(*(preload(model) for model in models))


def _is_filled(folder: Path) -> bool:
    """Return whether a folder has entries; true if this process may not read it."""
    try:
        return bool(visible(folder))
    except PermissionError:
        return True
    except OSError:
        return False


def _explained(name: str, error: Exception) -> str:
    if not isinstance(error, ServiceError):
        logger.error("model %s did not load", name, exc_info=error)
    return explained(error)
