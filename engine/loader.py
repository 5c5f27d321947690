"""What makes a loaded model of an artifact's folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, EngineError, InvalidRequest, ModelNotFound
from common.memory import MIB, return_freed_memory
from engine import backends
from engine.artifacts import adapter as adapters
from engine.artifacts.artifact import Artifact
from engine.backends.interface import BackendModel
from engine.backends.page_cache import read_in
from engine.budget import Budget
from engine.cores import Cores
from engine.model import Core, Model
from engine.native.adapter import NativeAdapter, load_adapter, num_bytes
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


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be loaded: the folder of a whole model, or an adapter's and its base's."""

    name: str
    path: Path
    backend: str
    precision: str
    max_rows: int
    base: Path | None = None

    @property
    def core_path(self) -> Path:
        """Of the folder that has the weights which are computed with."""
        return self.base or self.path


class Loader:
    """Admits a model to the budget, has its files read in a sandbox, and opens it."""

    def __init__(
        self,
        settings: Settings,
        budget: Budget,
        prefixes: Prefixes,
        residency: Residency,
        cores: Cores,
    ) -> None:
        self._settings, self._budget, self._cores = settings, budget, cores
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

    def needs(self, request: Request, reading: Reading) -> tuple[int, int]:
        """Bytes of the weights that are not there yet, and of a row's keys and values at its
        longest.

        What it reads, a load need not read again. Raises `ArtifactError`.
        """
        stamps = stamps_of(request.core_path)
        artifact = self._manifests.open(request.core_path, reading.run)
        needed, row = self._bytes(artifact, request.precision)
        if request.base is None:
            return needed, row
        adapter = self._adapter(request, artifact, reading)
        if self._cores.has(self._key(request, stamps)):
            needed = 0
        return needed + num_bytes(adapter, request.precision), row

    @staticmethod
    def _key(request: Request, stamps: Stamps) -> Hashable:
        return request.core_path, request.backend, request.precision, json.dumps(stamps)

    def _bytes(self, artifact: Artifact, precision: str) -> tuple[int, int]:
        config = artifact.config
        weights = backends.weight_bytes(config, precision, self._settings.device)
        return weights, backends.row_bytes(config, precision)

    def _adapter(self, request: Request, base: Artifact, reading: Reading) -> adapters.Adapter:
        """Raises `ArtifactError` for one that does not fit, `InvalidRequest` on a GPU."""
        if self._settings.device == "gpu":
            raise InvalidRequest(
                f"{request.path.name} is an adapter, and adapters are computed on a CPU only:"
                f" {adapters.MERGE}"
            )
        adapter = self._manifests.open_adapter(request.path, reading.run)
        adapter.check_fits(base.config)
        return adapter

    def load(self, request: Request, reading: Reading) -> Model:
        """Raises `ArtifactError`, `OutOfMemory`, `Cancelled`; leaves nothing behind then."""
        started = time.monotonic()
        stamps = stamps_of(request.core_path)
        artifact = self._manifests.open(request.core_path, reading.run)
        statistics = Statistics()
        with ExitStack() as undo:
            undo.callback(return_freed_memory)
            packed, generation = None, artifact.generation
            if request.base is not None:
                adapter = self._adapter(request, artifact, reading)
                packed = self._pack(request, adapter, artifact, undo, reading)
                generation = adapter.generation.over(artifact.generation)

            @functools.cache
            def texts() -> Texts:
                """Its process starts beside what follows, unless another model has it."""
                described = dataclasses.replace(artifact, generation=generation)
                queue = self._settings.max_queue
                made = Texts(described, statistics, queue, self._text_processes)
                undo.callback(made.close, ModelNotFound(f"{request.name} was not loaded"))
                return made

            model = self._cores.load(
                self._key(request, stamps),
                lambda: self._open_core(request, artifact, stamps, texts, reading),
                lambda core: Model(request.name, request.path, core, texts(), packed, statistics),
                is_adapter=request.base is not None,
            )
            undo.pop_all()
        try:
            model.texts.ready()
            batch = model.batch
            batch.max_rows = max(batch.max_rows, request.max_rows)
            if self._cache_dir is not None:
                prune(self._cache_dir, self._settings.cache_max_mib * MIB)
        except BaseException:
            reason = ModelNotFound(f"{request.name} was not loaded")
            self.free(model, self._cores.remove(model), reason)
            raise
        model.load_s = time.monotonic() - started
        return model

    def _pack(
        self,
        request: Request,
        adapter: adapters.Adapter,
        base: Artifact,
        undo: ExitStack,
        reading: Reading,
    ) -> NativeAdapter:
        """Its matrices, which are page cache: they count among what is loaded, not among what is
        resident. Raises `ArtifactError`, `OutOfMemory`."""
        size = num_bytes(adapter, request.precision)
        row = backends.row_bytes(base.config, request.precision)
        self._budget.declare(size, row, request.name)
        undo.callback(self._budget.withdraw, size, row, request.name)
        packed = load_adapter(adapter, base, request.precision, self._cache_dir, reading.run)
        undo.callback(packed.close)
        read_in(packed.mapped)
        return packed

    def _open_core(
        self,
        request: Request,
        artifact: Artifact,
        stamps: Stamps,
        texts: Callable[[], Texts],
        reading: Reading,
    ) -> Core:
        backend, precision = request.backend, request.precision
        needed, row = self._bytes(artifact, precision)
        name = self._cores.take_name(
            request.name if request.base is None else f"the base {request.base.name}"
        )
        with ExitStack() as undo:
            undo.callback(self._cores.free_name, name)
            self._budget.declare(needed, row, name)
            undo.callback(self._budget.withdraw, needed, row, name)
            core = Core(
                name=name,
                key=self._key(request, stamps),
                path=request.core_path,
                backend=backend,
                precision=precision,
                artifact=artifact,
                open=self._opener(artifact, stamps, backend, precision, texts()),
                batch=Batch(request.max_rows, self._budget, self._prefixes),
                reserved_bytes=needed,
            )
            undo.callback(self._residency.free, core)
            self._residency.enter(core, reading)
            undo.pop_all()
        return core

    def free(self, model: Model, last: bool, reason: EngineError) -> None:
        """Closes what a model has of its own, and its core where it was the `last` of that."""
        core = model.core
        model.texts.close(reason)
        try:
            if last:
                self._residency.free(core)
        finally:
            if last:
                self._budget.withdraw(core.reserved_bytes, core.row_bytes, core.name)
            if model.adapter is not None:
                model.adapter.close()
                self._budget.withdraw(model.adapter.num_bytes, core.row_bytes, model.name)
            return_freed_memory()

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
