"""What Multi Model Server is told of a model's worker, by what the model holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handlers.dispatch import brings_script, has_handler
from serving.settings import Settings

BATCHING = ("batch_size", "max_batch_delay")


def worker_options(
    path: Path, asked: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, Any], str | None]:
    """The options for MMS and the `handler` for the worker, from those of the load request.

    A model's own script gets the batches that were asked for, and one process unless more were.
    The built-in handlers only pass requests on: many at once, and never in MMS's batches, where a
    lone request waits and each ends with the longest.
    """
    options = dict(asked)
    handler: str | None = options.pop("handler", None)
    if handler is None and has_handler(path, settings.handler):
        handler = settings.handler
    if brings_script(path, handler):
        options.setdefault("initial_workers", settings.script_workers)
        return options, handler
    options.setdefault("initial_workers", settings.requests_at_once)
    return {k: v for k, v in options.items() if k not in BATCHING}, handler
