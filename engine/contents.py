"""What the folders of a model and of its base hold together.

A model is computed alone, or beside its base, with which it then shares weights and passes: an
adapter, a folder with a delta, or a whole fine-tune whose delta is made here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from common.model_files import ADAPTER, DELTA, is_adapter, is_delta
from engine.artifacts.adapter import Adapter
from engine.artifacts.artifact import Artifact
from engine.artifacts.merged import Merged, merge
from engine.native.delta import Delta, NoDelta, open_delta
from engine.native.delta_folder import open_folder
from engine.prepared.manifest import Manifests, Run, Stamps, stamps_of


@dataclass(frozen=True)
class Request:
    """A model to load: the folder of a whole model, adapter or delta, and of its base if any."""

    name: str
    path: Path
    backend: str
    precision: str
    max_rows: int
    base: Path | None = None


@dataclass(frozen=True)
class Contents:
    """The contents of a request's folders; a delta is to be closed."""

    artifact: Artifact  # what the core computes with
    adapter: Adapter | Delta | None  # what is computed beside it
    described: Artifact  # the tokenizer and the generation settings
    stamps: Mapping[Path, Stamps]  # of the folders that the artifact's weights are read from
    run: Run  # in sandboxes; raises `ArtifactError` if files change that the contents are of
    key: Hashable  # equal for equal weights, backend and precision
    whole_because: str = ""  # why a whole model that has a base is no delta of it
    labeled: Artifact | Adapter | None = None  # with the head of a classifier


class Reader:
    """Reads the folders of one request."""

    def __init__(
        self,
        request: Request,
        manifests: Manifests,
        run: Run,
        device: str,
        cache_dir: Path | None,
    ) -> None:
        """Note the state of the model's files. Raises `ArtifactError` without a folder.

        run: calls functions in sandboxes
        """
        self._request, self._manifests = request, manifests
        self._device, self._cache_dir = device, cache_dir
        self._stamps = {request.path: stamps_of(request.path)}
        self._run = while_unchanged(run, self._stamps)

    def read(self) -> Contents:
        """Return the contents.

        Raises `ArtifactError`, also if model and base do not fit, and if files change meanwhile.
        """
        path, base = self._request.path, self._request.base
        has_adapter, has_delta = is_adapter(path), is_delta(path)
        if has_adapter and has_delta:
            raise ArtifactError(f"the folder has {ADAPTER} and {DELTA}: one of them must go")
        if base is None or not (has_adapter or has_delta):
            return self._fine_tune(base)
        of_base = self._open_base(base)
        return self._delta(of_base) if has_delta else self._adapter(of_base)

    def _open_base(self, base: Path) -> Artifact:
        try:
            self._stamps[base] = stamps_of(base)
            return self._manifests.open(base, self._run)
        except ArtifactError as error:
            raise ArtifactError(f"its base: {error.message}") from None

    def _fine_tune(self, base: Path | None) -> Contents:
        whole = self._manifests.open(self._request.path, self._run)
        if base is None:
            return self._alone(whole, whole)
        try:
            of_base = self._open_base(base)
        except ArtifactError as error:
            return self._alone(whole, whole, error.message)
        return self._as_delta(whole, of_base, whole)

    def _adapter(self, of_base: Artifact) -> Contents:
        adapter = self._manifests.open_adapter(self._request.path, self._run)
        if of_base.classifier is not None and adapter.classifier is None:
            raise ArtifactError(
                "the base is a classifier: an adapter of it must have a head of its own"
                " (task_type SEQ_CLS or TOKEN_CLS)"
            )
        if self._device == "gpu" or not adapter.is_thin:
            return self._as_delta(merge(of_base, adapter), of_base, adapter)
        adapter.check_fits(of_base.config)
        return self._beside(of_base, adapter, adapter)

    def _delta(self, of_base: Artifact) -> Contents:
        folder = open_folder(self._manifests, self._request.path, self._run)
        try:
            self._check_deltas()
        except NoDelta as error:
            raise ArtifactError(
                f"a delta needs int8 on a CPU: {error.message}; serve the whole fine-tune"
            ) from None
        delta = folder.open(of_base, self._cache_dir, self._run)
        return self._beside(of_base, delta, folder.described)

    def _as_delta(
        self, whole: Artifact, of_base: Artifact, labeled: Artifact | Adapter
    ) -> Contents:
        """Return a whole model as a delta of its base, or alone, then with the reason."""
        try:
            self._check_deltas()
            delta = open_delta(whole, of_base, self._cache_dir, self._run)
        except NoDelta as error:
            return self._alone(whole, labeled, error.message)
        return self._beside(of_base, delta, labeled)

    def _check_deltas(self) -> None:
        """Raise `NoDelta` for a model that is not computed in int8 on a CPU."""
        if self._device == "gpu":
            raise NoDelta("a GPU computes no deltas")
        if (precision := self._request.precision) != "int8":
            raise NoDelta(f"its precision is {precision}, and deltas have int8")

    def _alone(self, whole: Artifact, labeled: Artifact | Adapter, because: str = "") -> Contents:
        read = self._stamps.keys() if isinstance(whole, Merged) else {self._request.path}
        return self._contents(whole, None, labeled, read, because)

    def _beside(
        self, of_base: Artifact, adapter: Adapter | Delta, labeled: Artifact | Adapter
    ) -> Contents:
        assert self._request.base is not None
        return self._contents(of_base, adapter, labeled, {self._request.base})

    def _contents(
        self,
        artifact: Artifact,
        adapter: Adapter | Delta | None,
        labeled: Artifact | Adapter,
        read: Collection[Path],
        because: str = "",
    ) -> Contents:
        described = artifact if adapter is None else adapter.described(artifact)
        stamps = {folder: of for folder, of in self._stamps.items() if folder in read}
        weights = json.dumps([*map(str, stamps), *stamps.values()])
        key = (self._request.backend, self._request.precision, artifact.content, weights)
        with_labels = labeled if labeled.classifier else None
        return Contents(artifact, adapter, described, stamps, self._run, key, because, with_labels)


def while_unchanged(run: Run, folders: Mapping[Path, Stamps]) -> Run:
    """Return `run`, which also raises `ArtifactError` if files change before its end.

    Without that, a prepared file of one content could have the numbers of another, for ever.
    """

    def checked(*arguments: Any, **options: Any) -> Any:
        check_unchanged(folders)
        value = run(*arguments, **options)
        check_unchanged(folders)
        return value

    return checked


def check_unchanged(folders: Mapping[Path, Stamps]) -> None:
    """Raise `ArtifactError` if the files of a folder are no more those of its stamps."""
    for folder, stamps in folders.items():
        if stamps_of(folder) != stamps:
            raise ArtifactError(
                "the files of the model or its base have changed since they were read:"
                " load it again"
            )
