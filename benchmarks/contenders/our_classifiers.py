"""Contender: our engine in one process, with a classifier, and with a base and its adapters.

The arguments are the precision and the folders of the classifier, the base and the adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from benchmarks.worker import Started
from common.errors import EngineError
from engine.classification import Outputs
from engine.engine import Engine
from engine.settings import Settings
from handlers.text.bulk import chunks

DEADLINE_S = 120
WHOLE, BASE = "whole", "base"


class Texts:
    """Texts that are classified, each by a model, and their logits."""

    def __init__(self, engine: Engine, texts: Sequence[str], models: Sequence[str]) -> None:
        self._logits: list[list[float]] = [[] for _ in texts]
        self._left, self._done = len(texts), threading.Event()
        self._lock, self._error = threading.Lock(), EngineError("")
        for model in dict.fromkeys(models):
            places = [i for i, name in enumerate(models) if name == model]
            for first, part in chunks([[texts[i]] for i in places]):
                self._submit(engine, model, part, places[first : first + len(part)])

    def _submit(
        self, engine: Engine, model: str, part: Sequence[Sequence[str]], places: Sequence[int]
    ) -> None:
        def emit(item: Outputs | EngineError) -> None:
            with self._lock:
                if isinstance(item, EngineError):
                    self._error, self._left = item, 0
                else:
                    self._logits[places[item.index]] = item.logits[0]
                    self._left -= 1
                if self._left <= 0:
                    self._done.set()

        engine.classify(model, part, emit, DEADLINE_S).result()

    def wait(self) -> list[list[float]]:
        """Return the logits of each text. Raises `EngineError`."""
        self._done.wait()
        if not all(self._logits):
            raise self._error
        return self._logits


def start(backend: str, precision: str, whole: str, *folders: str) -> Started:
    engine = Engine(Settings(backend=backend, precision=precision))
    engine.load(WHOLE, whole)
    base, *adapters = folders or (None,)
    if base:
        engine.load(BASE, base)
    names = [engine.load(str(i), folder, base=base).name for i, folder in enumerate(adapters)]

    def classify(texts: list[str], adapters: int) -> list[list[float]]:
        """Return the logits of texts by so many adapters in turn; 0: by the whole classifier."""
        some = names[:adapters] or [WHOLE]
        return Texts(engine, texts, [some[i % len(some)] for i in range(len(texts))]).wait()

    commands: dict[str, Any] = {"classify": classify, "close": engine.close}
    return {}, commands
