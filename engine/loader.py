"""Loads models from artifact folders."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, EngineError, ModelNotFound
from common.memory import MIB, return_freed_memory
from common.model_files import ADAPTER, DELTA, is_adapter, is_delta
from engine import backends
from engine.artifacts import adapter as adapters
from engine.artifacts.artifact import Artifact
from engine.artifacts.merged import Merged, merge
from engine.backends.interface import BackendModel
from engine.budget import Budget
from engine.classification import head_bytes, head_of
from engine.cores import Cores
from engine.model import Core, Model
from engine.native.adapter import NativeAdapter, load_adapter, num_bytes
from engine.native.delta import Delta, NoDelta, open_delta
from engine.native.delta_folder import open_folder
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

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Request:
    """A model to load: the folder of a whole model, adapter or delta, and of its base if any."""

    name: str
    path: Path
    backend: str
    precision: str
    max_rows: int
    base: Path | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """The contents of a request's folders."""

    artifact: Artifact  # what the core computes with
    adapter: adapters.Adapter | Delta | None  # what is computed beside it
    described: Artifact  # the tokenizer and the generation settings
    stamps: Mapping[Path, Stamps]  # of the folders that the artifact's weights are read from
    run: Run  # in sandboxes; raises `ArtifactError` if files change that the contents are of
    key: Hashable  # equal for equal weights, backend and precision
    whole_because: str = ""  # why a whole model that has a base is no delta of it
    labeled: Artifact | adapters.Adapter | None = None  # with the head of a classifier


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
        source = self._source(request, reading)
        needed, row = self._bytes(source.artifact, request.precision)
        if source.adapter is not None:
            needed = 0 if self._cores.has(source.key) else needed
            needed += _num_bytes(source.adapter, request.precision)
        if source.labeled is not None:
            needed += head_bytes(source.labeled)
        if isinstance(source.adapter, Delta):
            source.adapter.close()
        return needed, row

    def _source(self, request: Request, reading: Reading) -> Source:
        """Read a request's folders; a delta is to be closed.

        Raises `ArtifactError`, also if adapter and base do not fit, and if files change meanwhile.
        """
        path, base = request.path, request.base
        files = {path: stamps_of(path)}
        run = _while_unchanged(reading.run, files)
        has_adapter, has_delta = is_adapter(path), is_delta(path)
        if has_adapter and has_delta:
            raise ArtifactError(f"the folder has {ADAPTER} and {DELTA}: one of them must go")
        whole: Artifact | None = None
        adapter: adapters.Adapter | Delta | None = None
        of_base, whole_because = None, ""
        if base is None or not (has_adapter or has_delta):
            whole = self._manifests.open(path, run)
        if base is not None:
            try:
                files[base] = stamps_of(base)
                of_base = self._manifests.open(base, run)
            except ArtifactError as error:
                whole_because = f"its base: {error.message}"
                if whole is None:
                    raise ArtifactError(whole_because) from None
        labeled: Artifact | adapters.Adapter | None = None
        if whole is not None:
            labeled = whole
        elif has_delta:
            assert of_base is not None
            folder = open_folder(self._manifests, path, run)
            try:
                self._check_deltas(request)
            except NoDelta as error:
                raise ArtifactError(
                    f"a delta needs int8 on a CPU: {error.message}; serve the whole fine-tune"
                ) from None
            labeled = folder.described
            adapter = folder.open(of_base, self._cache_dir, run)
        else:
            assert of_base is not None
            labeled = adapter = self._manifests.open_adapter(path, run)
            if of_base.classifier is not None and adapter.classifier is None:
                raise ArtifactError(
                    "the base is a classifier: an adapter of it must have a head of its own"
                    " (task_type SEQ_CLS or TOKEN_CLS)"
                )
            if self._settings.device == "gpu" or not adapter.is_thin:
                whole, adapter = merge(of_base, adapter), None
            else:
                adapter.check_fits(of_base.config)
        if whole is not None and of_base is not None:
            try:
                self._check_deltas(request)
                adapter = open_delta(whole, of_base, self._cache_dir, run)
            except NoDelta as error:
                whole_because = error.message
        if adapter is not None and of_base is not None:
            artifact, described, of_weights = of_base, adapter.described(of_base), {base}
        else:
            assert whole is not None
            artifact = described = whole
            of_weights = {path, base} if isinstance(whole, Merged) else {path}
        stamps = {folder: of for folder, of in files.items() if folder in of_weights}
        read = json.dumps([*map(str, stamps), *stamps.values()])
        key = (request.backend, request.precision, artifact.content, read)
        with_labels = labeled if labeled and labeled.classifier else None
        return Source(artifact, adapter, described, stamps, run, key, whole_because, with_labels)

    def _check_deltas(self, request: Request) -> None:
        """Raise `NoDelta` for a model that is not computed in int8 on a CPU."""
        if self._settings.device == "gpu":
            raise NoDelta("a GPU computes no deltas")
        if request.precision != "int8":
            raise NoDelta(f"its precision is {request.precision}, and deltas have int8")

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
        source = self._source(request, reading)
        artifact = source.artifact
        if source.whole_because:
            logger.info(
                "%s shares nothing with its base, and takes %d MiB of its own: %s", request.name,
                self._bytes(artifact, request.precision)[0] // MIB, source.whole_because,
            )  # fmt: skip
        statistics = Statistics()
        with ExitStack() as undo:
            undo.callback(return_freed_memory)
            packed = None
            if isinstance(source.adapter, Delta):
                undo.callback(source.adapter.close)
                logger.info("%s is a delta of its base: %s", request.name, source.adapter.summary)
            if source.adapter is not None:
                packed = self._pack(request, source.adapter, source, undo)

            head = None
            if (labeled := source.labeled) is not None:
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
                source.described, statistics, self._settings.max_queue, self._text_processes
            )
            undo.callback(texts.close, ModelNotFound("the model was not loaded"))
            model = self._cores.load(
                source.key,
                lambda: self._open_core(request, source, texts, reading),
                lambda core: Model(
                    request.name,
                    request.path,
                    core,
                    texts,
                    packed,
                    request.base,
                    source.whole_because,
                    head,
                    statistics,
                ),
                is_adapter=source.adapter is not None,
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
        source: Source,
        undo: ExitStack,
    ) -> NativeAdapter:
        """Load an adapter's matrices. Raises as `Budget.declare`."""
        base = source.artifact
        size = _num_bytes(adapter, request.precision)
        row = backends.row_bytes(base.config, request.precision)
        self._budget.declare(size, row, request.name)
        undo.callback(self._budget.withdraw, size, row, request.name)
        if isinstance(adapter, Delta):
            packed = adapter.load()
        else:
            packed = load_adapter(adapter, base, request.precision, self._cache_dir, source.run)
        undo.callback(packed.close)
        packed.read_in()
        return packed

    def _open_core(self, request: Request, source: Source, texts: Texts, reading: Reading) -> Core:
        artifact = source.artifact
        needed, row = self._bytes(artifact, request.precision)
        name = self._cores.take_name(
            request.name if source.adapter is None else f"the base of {request.name}"
        )
        with ExitStack() as undo:
            undo.callback(self._cores.free_name, name)
            self._budget.declare(needed, row, name)
            undo.callback(self._budget.withdraw, needed, row, name)
            core = Core(
                name=name,
                key=source.key,
                backend=request.backend,
                precision=request.precision,
                artifact=artifact,
                open=self._opener(request, source, texts),
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
        self, request: Request, source: Source, texts: Texts
    ) -> Callable[[Run], BackendModel]:
        """Return a function that opens the artifact's weights, also again after an eviction.

        It raises `ArtifactError` if it has to read files that have changed since the load, or if
        the model's tokenizer is unusable.
        """

        def load(run: Run) -> BackendModel:
            def checked(*arguments: Any, **options: Any) -> Any:
                texts.ready()
                return _while_unchanged(run, source.stamps)(*arguments, **options)

            if self._settings.device == "gpu":
                texts.ready()
                _check_unchanged(source.stamps)
            return backends.load(
                dataclasses.replace(source.artifact),  # a copy: mappings end with it
                request.backend,
                request.precision,
                device=self._settings.device,
                cache_dir=self._cache_dir,
                run=checked,
            )

        return load


def _while_unchanged(run: Run, folders: Mapping[Path, Stamps]) -> Run:
    """Return `run`, which also raises `ArtifactError` if files change before its end.

    Without that, a prepared file of one content could have the numbers of another, for ever.
    """

    def checked(*arguments: Any, **options: Any) -> Any:
        _check_unchanged(folders)
        value = run(*arguments, **options)
        _check_unchanged(folders)
        return value

    return checked


def _check_unchanged(folders: Mapping[Path, Stamps]) -> None:
    """Raise `ArtifactError` if the files of a folder are no more those of its stamps."""
    for folder, stamps in folders.items():
        if stamps_of(folder) != stamps:
            raise ArtifactError(
                "the files of the model or its base have changed since they were read:"
                " load it again"
            )


def _num_bytes(adapter: adapters.Adapter | Delta, precision: str) -> int:
    """Return the bytes that the budget counts for what is computed beside a base."""
    return adapter.num_bytes if isinstance(adapter, Delta) else num_bytes(adapter, precision)
