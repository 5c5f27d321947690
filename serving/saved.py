"""What is loaded, written down for a gateway that is started again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from serving.model import Model
from serving.store import StoredModel


class SavedModels:
    """A file in the run folder, replaced at every change."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "models.json"

    def write(self, models: Iterable[Model]) -> None:
        rows = [
            {
                "name": model.name,
                "url": model.url,
                "id": model.id,
                "stored": dataclasses.asdict(model.stored.without_secrets()),
                "options": dict(model.options),
                "in_engine": model.in_engine,
                "socket": model.socket,
            }
            for model in models
        ]
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(rows), encoding="utf-8")
        fresh.replace(self._path)

    def read(self) -> list[Model]:
        """As they were written, not yet fetched; none where no gateway was before."""
        try:
            rows = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [Model(**{**row, "stored": StoredModel(**row["stored"])}) for row in rows]
