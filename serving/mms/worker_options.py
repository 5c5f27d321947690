"""Multi Model Server's options for a model's worker, by the model's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.dispatch import brings_script, has_handler
from serving.settings import Settings

BATCHING = ("batch_size", "max_batch_delay")


def worker_options(
    path: Path, requested: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, Any], str | None]:
    """The options for MMS and the `handler` for the worker, from those `requested` for the load.

    A model's own script gets the requested batches and SCRIPT_WORKERS processes by default. The
    built-in handlers forward requests concurrently and without MMS's batches, in which a single
    request waits for others and all take as long as the longest.
    """
    options = dict(requested)
    handler: str | None = options.pop("handler", None)
    if handler is None and has_handler(path, settings.handler):
        handler = settings.handler
    if brings_script(path, handler):
        options.setdefault("initial_workers", settings.script_workers)
        return options, handler
    options.setdefault("initial_workers", settings.requests_at_once)
    return {k: v for k, v in options.items() if k not in BATCHING}, handler
