"""What makes a loaded model of an artifact's folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, ModelNotFound
from common.memory import MIB, return_freed_memory
from engine import backends
from engine.artifacts.artifact import Artifact
from engine.backends.interface import BackendModel
from engine.budget import Budget
from engine.model import Model
from engine.prefixes import Prefixes
from engine.prepared.folder import prune
from engine.prepared.manifest import Manifests, Run, Stamps, stamps_of
from engine.residency import Residency
from engine.sandbox.reading import Reading
from engine.scheduler import Batch
from engine.settings import Settings
from engine.statistics import Statistics
from engine.text.process import TextProcesses
from engine.text.texts import Texts


class Loader:
    """Admits a model to the budget, has its files read in a sandbox, and opens it."""

    def __init__(
        self, settings: Settings, budget: Budget, prefixes: Prefixes, residency: Residency
    ) -> None:
        self._settings, self._budget = settings, budget
        self._prefixes, self._residency = prefixes, residency
        self._cache_dir = Path(settings.cache_dir) if settings.cache_dir else None
        self._manifests = Manifests(self._cache_dir)
        self._text_processes = TextProcesses()

    def resolve(self, backend: str | None, precision: str | None) -> tuple[str, str]:
        """With the defaults for what is not given. Raises `InvalidRequest`."""
        backend = backend or self._settings.backend
        default = self._settings.precision if backend == self._settings.backend else ""
        backends.check_backend(backend, self._settings.device)
        known = backends.precisions(backend, self._settings.device)
        precision = precision or default or known[0]
        backends.check(backend, precision, self._settings.device)
        return backend, precision

    def needs(self, path: Path, precision: str, reading: Reading) -> tuple[int, int]:
        """Bytes of the weights, and of a row's keys and values at its longest.

        What it reads, a load need not read again. Raises `ArtifactError`.
        """
        return self._bytes(self._manifests.open(path, reading.run), precision)

    def _bytes(self, artifact: Artifact, precision: str) -> tuple[int, int]:
        config = artifact.config
        weights = backends.weight_bytes(config, precision, self._settings.device)
        return weights, backends.row_bytes(config, precision)

    def load(
        self,
        name: str,
        path: Path,
        backend: str,
        precision: str,
        max_rows: int,
        reading: Reading,
    ) -> Model:
        """Raises `ArtifactError`, `OutOfMemory`, `Cancelled`; leaves nothing behind then."""
        started = time.monotonic()
        stamps = stamps_of(path)
        artifact = self._manifests.open(path, reading.run)
        needed, row = self._bytes(artifact, precision)
        self._budget.declare(needed, row, name)
        model = texts = None
        statistics = Statistics()
        try:
            # Its process starts beside what follows, unless another model has it.
            texts = Texts(artifact, statistics, self._settings.max_queue, self._text_processes)
            model = Model(
                name=name,
                path=path,
                backend=backend,
                precision=precision,
                config=artifact.config,
                open=self._opener(artifact, stamps, backend, precision, texts),
                texts=texts,
                batch=Batch(max_rows, self._budget, self._prefixes),
                reserved_bytes=needed,
                statistics=statistics,
            )
            self._residency.enter(model, reading)
            texts.ready()
            if self._cache_dir is not None:
                prune(self._cache_dir, self._settings.cache_max_mib * MIB)
        except BaseException:
            if model is not None:
                self._residency.free(model)
            if texts is not None:
                texts.close(ModelNotFound(f"{name} was not loaded"))
            self._budget.withdraw(needed, row, name)
            return_freed_memory()
            raise
        model.load_s = time.monotonic() - started
        return model

    def close(self) -> None:
        """Once no model is left."""
        self._text_processes.close()

    def _opener(
        self, artifact: Artifact, stamps: Stamps, backend: str, precision: str, texts: Texts
    ) -> Callable[[Run], BackendModel]:
        """What opens the artifact, as often as it is called. It raises `ArtifactError` where it has
        to read the artifact's files and they are not those of `stamps` any more, or its `texts` are
        found to be none before."""

        def check() -> None:
            texts.ready()
            if stamps_of(artifact.path) != stamps:
                raise ArtifactError(f"{artifact.path.name} has changed since it was loaded")

        def load(run: Run) -> BackendModel:
            def checked(*arguments: Any, **options: Any) -> Any:
                check()
                return run(*arguments, **options)

            if self._settings.device == "gpu":
                check()
            return backends.load(
                dataclasses.replace(artifact),  # what it maps goes with it
                backend,
                precision,
                device=self._settings.device,
                cache_dir=self._cache_dir,
                run=checked,
            )

        return load
