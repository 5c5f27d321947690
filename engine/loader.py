"""Loads models from artifact folders."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, EngineError, ModelNotFound
from common.memory import MIB, return_freed_memory
from engine import backends
from engine.artifacts import adapter as adapters
from engine.artifacts.artifact import Artifact
from engine.backends.interface import BackendModel
from engine.budget import Budget
from engine.classification import head_bytes, head_of
from engine.contents import Contents, Reader, Request, check_unchanged, while_unchanged
from engine.cores import Cores
from engine.model import Core, Model
from engine.native.adapter import NativeAdapter, load_adapter, num_bytes
from engine.native.delta import Delta
from engine.prefixes import Prefixes
from engine.prepared.folder import prune
from engine.prepared.manifest import Manifests, Run
from engine.residency import Residency
from engine.sandbox.reading import Reading
from engine.scheduler import Batch
from engine.settings import Settings
from engine.statistics import Statistics
from engine.text.process import TextProcesses
from engine.text.texts import Texts

logger = logging.getLogger(__name__)


class Loader:
    """Admits models to the budget, reads their files in a sandbox, and opens them."""

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

    def request(
        self,
        name: str,
        model_dir: str,
        backend: str | None,
        precision: str | None,
        max_rows: int | None,
        base: str | None,
    ) -> Request:
        """Make a request, with defaults from the settings. Raises `InvalidRequest`."""
        settings = self._settings
        backend = backend or settings.backend
        default = settings.precision if backend == settings.backend else ""
        precision = precision or default or backends.precisions(backend, settings.device)[0]
        backends.check(backend, precision, settings.device)
        path, base_path = Path(model_dir).resolve(), None if base is None else Path(base).resolve()
        return Request(name, path, backend, precision, max_rows or settings.max_rows, base_path)

    def needs(self, request: Request, reading: Reading) -> tuple[int, int]:
        """Return the bytes of weights that a load adds, and the K/V bytes of a full row."""
        contents = self._read(request, reading)
        needed, row = self._bytes(contents.artifact, request.precision)
        if contents.adapter is not None:
            needed = 0 if self._cores.has(contents.key) else needed
            needed += _num_bytes(contents.adapter, request.precision)
        if contents.labeled is not None:
            needed += head_bytes(contents.labeled)
        if isinstance(contents.adapter, Delta):
            contents.adapter.close()
        return needed, row

    def _read(self, request: Request, reading: Reading) -> Contents:
        """Read a request's folders. Raises as `contents.Reader.read`."""
        device = self._settings.device
        return Reader(request, self._manifests, reading.run, device, self._cache_dir).read()

    def _bytes(self, artifact: Artifact, precision: str) -> tuple[int, int]:
        config = artifact.config
        weights = backends.weight_bytes(config, precision, self._settings.device)
        return weights, backends.row_bytes(config, precision)

    def load(
        self,
        request: Request,
        reading: Reading,
        discard: Callable[[Model, EngineError], object],
    ) -> Model:
        """Load a model; if that fails, undo all of it. Raises `EngineError`.

        `discard` removes a model from its core and frees it while no step of the core is computed.
        """
        started = time.monotonic()
        contents = self._read(request, reading)
        artifact = contents.artifact
        if contents.whole_because:
            logger.info(
                "%s shares nothing with its base, and takes %d MiB of its own: %s", request.name,
                self._bytes(artifact, request.precision)[0] // MIB, contents.whole_because,
            )  # fmt: skip
        statistics = Statistics()
        with ExitStack() as undo:
            undo.callback(return_freed_memory)
            packed = None
            if isinstance(contents.adapter, Delta):
                undo.callback(contents.adapter.close)
                logger.info("%s is a delta of its base: %s", request.name, contents.adapter.summary)
            if contents.adapter is not None:
                packed = self._pack(request, contents.adapter, contents, undo)

            head = None
            if (labeled := contents.labeled) is not None:
                if self._settings.device == "gpu":
                    raise ArtifactError("the model is a classifier, which needs a CPU")
                size, row = (
                    head_bytes(labeled),
                    backends.row_bytes(artifact.config, request.precision),
                )
                self._budget.declare(size, row, request.name)
                undo.callback(self._budget.withdraw, size, row, request.name)
                head = head_of(labeled)

            # Their process starts while weights are opened. Not under the engine's lock: the
            # tokenizer's files are read and hashed, and no token is made while that is held.
            texts = Texts(
                contents.described, statistics, self._settings.max_queue, self._text_processes
            )
            undo.callback(texts.close, ModelNotFound("the model was not loaded"))
            model = self._cores.load(
                contents.key,
                lambda: self._open_core(request, contents, texts, reading),
                lambda core: Model(
                    request.name,
                    request.path,
                    core,
                    texts,
                    packed,
                    request.base,
                    contents.whole_because,
                    head,
                    statistics,
                ),
                is_adapter=contents.adapter is not None,
            )
            undo.pop_all()
        try:
            self._residency.take_adapter(model)
            model.texts.ready()
            batch = model.batch
            batch.max_rows = max(batch.max_rows, request.max_rows)
            if self._cache_dir is not None:
                prune(self._cache_dir, self._settings.cache_max_mib * MIB)
        except BaseException:
            discard(model, ModelNotFound("the model was not loaded"))
            raise
        model.load_s = time.monotonic() - started
        return model

    def _pack(
        self,
        request: Request,
        adapter: adapters.Adapter | Delta,
        contents: Contents,
        undo: ExitStack,
    ) -> NativeAdapter:
        """Load an adapter's matrices. Raises as `Budget.declare`."""
        base = contents.artifact
        size = _num_bytes(adapter, request.precision)
        row = backends.row_bytes(base.config, request.precision)
        self._budget.declare(size, row, request.name)
        undo.callback(self._budget.withdraw, size, row, request.name)
        if isinstance(adapter, Delta):
            packed = adapter.load()
        else:
            packed = load_adapter(adapter, base, request.precision, self._cache_dir, contents.run)
        undo.callback(packed.close)
        packed.read_in()
        return packed

    def _open_core(
        self, request: Request, contents: Contents, texts: Texts, reading: Reading
    ) -> Core:
        artifact = contents.artifact
        needed, row = self._bytes(artifact, request.precision)
        name = self._cores.take_name(
            request.name if contents.adapter is None else f"the base of {request.name}"
        )
        with ExitStack() as undo:
            undo.callback(self._cores.free_name, name)
            self._budget.declare(needed, row, name)
            undo.callback(self._budget.withdraw, needed, row, name)
            core = Core(
                name=name,
                key=contents.key,
                backend=request.backend,
                precision=request.precision,
                artifact=artifact,
                open=self._opener(request, contents, texts),
                batch=Batch(request.max_rows, self._budget, self._prefixes),
                reserved_bytes=needed,
            )
            undo.callback(self._residency.close_core, core)
            self._residency.open_new(core, reading)
            undo.pop_all()
        return core

    def free(self, model: Model, last: bool, reason: EngineError) -> None:
        """Close a model's texts and adapter, and its core if the model was the `last` on it."""
        core, adapter, head = model.core, model.adapter, model.head
        with ExitStack() as steps:  # each is done even if another raises, the last one first
            steps.callback(return_freed_memory)
            if head is not None:
                steps.callback(self._budget.withdraw, head.num_bytes, core.row_bytes, model.name)
            if adapter is not None:
                steps.callback(self._budget.withdraw, adapter.num_bytes, core.row_bytes, model.name)
                steps.callback(adapter.close)
                steps.callback(self._residency.forget_adapter, model)
            if last:
                weights, row = core.reserved_bytes, core.row_bytes
                steps.callback(self._budget.withdraw, weights, row, core.name)
                steps.callback(self._residency.close_core, core)
            model.texts.close(reason)

    def close(self) -> None:
        """Close the text processes, once no model is loaded."""
        self._text_processes.close()

    def _opener(
        self, request: Request, contents: Contents, texts: Texts
    ) -> Callable[[Run], BackendModel]:
        """Return a function that opens the artifact's weights, also again after an eviction.

        It raises `ArtifactError` if it has to read files that have changed since the load, or if
        the model's tokenizer is unusable.
        """

        def load(run: Run) -> BackendModel:
            def checked(*arguments: Any, **options: Any) -> Any:
                texts.ready()
                return while_unchanged(run, contents.stamps)(*arguments, **options)

            if self._settings.device == "gpu":
                texts.ready()
                check_unchanged(contents.stamps)
            return backends.load(
                dataclasses.replace(contents.artifact),  # a copy: mappings end with it
                request.backend,
                request.precision,
                device=self._settings.device,
                cache_dir=self._cache_dir,
                run=checked,
            )

        return load


def _num_bytes(adapter: adapters.Adapter | Delta, precision: str) -> int:
    """Return the bytes that the budget counts for what is computed beside a base."""
    return adapter.num_bytes if isinstance(adapter, Delta) else num_bytes(adapter, precision)
