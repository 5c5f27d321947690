"""The texts of a model, as the engine opens them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ModelNotFound
from engine.artifacts.open import open_artifact
from engine.statistics import Statistics
from engine.text.process import TextProcesses
from engine.text.texts import Texts


@contextmanager
def texts_of(
    folder: Path, max_waiting: int = 9, processes: TextProcesses | None = None
) -> Iterator[Texts]:
    """Ready for use. With `processes` others may share its process."""
    pool = processes or TextProcesses()
    texts = Texts(open_artifact(folder), Statistics(), max_waiting, pool)
    try:
        yield texts.ready()
    finally:
        texts.close(ModelNotFound("closed"))
        if processes is None:
            pool.close()
