"""What is loaded, written down for a gateway that is started again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serving.admission import Line
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
                "metadata": model.metadata,
                "capacity": model.line.capacity,
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
        return [_model(**row) for row in rows]


def _model(stored: Mapping[str, Any], capacity: int, **fields: Any) -> Model:
    return Model(stored=StoredModel(**stored), line=Line(capacity), **fields)
