"""Stores the list of loaded models in RUN_DIR, for a restarted gateway to take them over."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serving.models.admission import Line
from serving.models.model import LoadRequest, Model
from serving.models.model_settings import ModelSettings
from serving.store import StoredModel, public_url
from serving.store.disk import write_whole

logger = logging.getLogger(__name__)


class Snapshot:
    """The file `models.json` in RUN_DIR, replaced at every change."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "models.json"
        self._written = self._wanted = ""  # content of the file, and what it should be
        self._rows: dict[str, tuple[dict[str, Any], str]] = {}  # values and JSON, by id
        self._failing = False
        self._writing: asyncio.Task[None] | None = None

    async def write(self, models: Iterable[Model], requests: Mapping[str, LoadRequest]) -> None:
        """Write the lists of models and of remembered load requests, whose urls lose secrets.

        Returns once the file has them, or later ones. An error such as a full disk is logged;
        `retry` tries again.
        """
        known, self._rows = self._rows, {}
        for model in models:  # reuse the JSON of unchanged ones: there may be hundreds
            values = _values(model)
            row = known.get(model.id)
            if row is None or row[0] != values:
                row = values, json.dumps(_row(model) | values, default=ModelSettings.values)
            self._rows[model.id] = row
        rows = ", ".join(text for _, text in self._rows.values())
        known_requests = {name: _request_row(request) for name, request in requests.items()}
        self._wanted = f'{{"models": [{rows}], "requests": {json.dumps(known_requests)}}}'
        await self.retry()

    async def retry(self) -> None:
        """Write the lists, unless the file has them already."""
        if self._wanted == self._written:
            return
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await asyncio.shield(self._writing)  # a cancelled request must not break off a write

    async def _write(self) -> None:
        """Write on a thread, one list after the other, until the file has the last one."""
        while (text := self._wanted) != self._written:
            try:
                await asyncio.to_thread(write_whole, self._path, text.encode())
            except OSError as error:
                if not self._failing:
                    logger.error("the list of loaded models was not written: %s", error)
                self._failing = True
                return
            self._written, self._failing = text, False

    def exists(self) -> bool:
        return self._path.exists()

    def read(self) -> tuple[list[Model], dict[str, LoadRequest]]:
        """Read models, without fetching them, and load requests; empty without a valid file."""
        try:
            read = json.loads(self._path.read_text(encoding="utf-8"))
            requests = {name: _request(row) for name, row in read["requests"].items()}
            return [_model(row) for row in read["models"]], requests
        except FileNotFoundError:
            return [], {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.error("the list of loaded models cannot be read: %r", error)
            return [], {}


def _request_row(request: LoadRequest) -> dict[str, Any]:
    settings, options = request.settings.values(), dict(request.options)
    return {"url": public_url(request.url), "settings": settings, "options": options}


def _request(row: dict[str, Any]) -> LoadRequest:
    return LoadRequest(row["url"], ModelSettings(**row["settings"]), row["options"])


def _values(model: Model) -> dict[str, Any]:
    """Return the values of a model's row that can change while it is loaded."""
    return {
        "options": dict(model.options),
        "settings": model.settings,
        "in_engine": model.in_engine,
        "socket": model.socket,
        "batch_size": model.batch_size,
        "load_s": model.load_s,
        "metadata": model.metadata,
        "whole_because": model.whole_because,
        "line": {"capacity": model.line.capacity, "max_waiting": model.line.max_waiting},
    }


def _row(model: Model) -> dict[str, Any]:
    base = model.stored_base
    return {
        "name": model.name,
        "url": model.url,
        "id": model.id,
        "stored": dataclasses.asdict(model.stored.without_secrets()),
        "stored_base": base and dataclasses.asdict(base.without_secrets()),
        "is_adapter": model.is_adapter,
        "is_delta": model.is_delta,
    }


def _model(row: dict[str, Any]) -> Model:
    stored, settings = StoredModel(**row["stored"]), ModelSettings(**row["settings"])
    base = row.get("stored_base") and StoredModel(**row["stored_base"])
    line = Line(**row["line"])
    parsed = {"stored": stored, "stored_base": base, "settings": settings, "line": line}
    return Model(**row | parsed)
