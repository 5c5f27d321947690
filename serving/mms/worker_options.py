"""Chooses Multi Model Server's options for a model's worker by the files of the model."""

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
    """Return MMS's options for a worker, and its `handler` (None: the files decide).

    `requested` are the options of the load request. A model's own script gets the requested batches
    and SCRIPT_WORKERS processes by default. Built-in handlers get no batches, in which a request
    would wait for others and take as long as the longest: they forward requests concurrently.
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
