"""A store of models in a bucket of objects under keys, such as S3."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from serving.errors import ArtifactChanged, ModelNotInStore, UrlNotAllowed
from serving.names import archive_spellings, is_clean, model_name, spellings
from serving.store.archive_limits import MAX_DEPTH, MAX_FILES
from serving.store.catalog import (
    StoredFile,
    StoredModel,
    folder_model,
    holds_model,
    models_among,
    not_a_model,
)


class Bucket(Protocol):
    """The operations on a bucket of any provider. Keys are complete, versions are ETags.

    `paced`: see `Remote`. Methods raise `StoreUnavailable`, `StoreAccessDenied`,
    `ModelNotInStore`.
    """

    paced: bool

    def head(self, key: str) -> StoredFile | None:
        """Return the object with a key, or None."""

    def list(self, prefix: str) -> Iterator[StoredFile]:
        """Yield all objects whose key begins with `prefix`; `path` is the whole key."""

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        """See `Remote.read`."""


MAX_SHOWN = 5  # objects that a message names


class ObjectStore:
    """The models under a prefix: `<name>.tar.gz` or `.mar`, or unpacked below `<name>/`.

    `address` is the url of the bucket, for example `s3://bucket/`.
    """

    ranged = True

    def __init__(self, bucket: Bucket, address: str, prefix: str) -> None:
        self._bucket, self._address, self.paced = bucket, address, bucket.paced
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.location = address + self._prefix

    def models(self) -> list[StoredModel]:
        return models_among(self._below(self._prefix), lambda path: self.location + path)

    def find(self, name: str, handler: str | None = None) -> StoredModel:
        name = model_name(name)
        for spelling in archive_spellings(name):
            file = self._bucket.head(self._prefix + spelling)
            if file is not None:
                url = self._address + file.path
                return StoredModel(name, url, file.version, file.size_bytes, "archive")
        for spelling in spellings(name):
            url = f"{self.location}{spelling}/"
            files = self._folder(url)
            if holds_model(files, handler):
                return folder_model(name, url, files)
            if paths := [file.path for file in files] or self._named(spelling):
                raise not_a_model(name, paths)
        raise ModelNotInStore(f"there is no model {name} in the store")

    def locate(self, url: str, handler: str | None = None) -> StoredModel:
        """Return the model at a url of this store. Raises `UrlNotAllowed` for other urls."""
        if not url.startswith(self.location):
            raise UrlNotAllowed(f"{url} is outside of {self.location}")
        return self.find(url.removeprefix(self.location).rstrip("/"), handler)

    def file(self, path: str) -> StoredFile | None:
        return self._bucket.head(self._prefix + path)

    def files(self, model: StoredModel) -> list[StoredFile]:
        if model.kind == "archive":
            key = model.url.removeprefix(self._address)
            return [StoredFile("", key, model.size_bytes, model.version)]
        files = self._folder(model.url)
        if folder_model(model.name, model.url, files) != model:
            raise ArtifactChanged(f"{model.url} has changed; try again")
        return files

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        return self._bucket.read(file, start, stop)

    def _named(self, name: str) -> list[str]:
        """Return the first MAX_SHOWN objects with this name and any suffix."""
        below = itertools.islice(self._below(f"{self._prefix}{name}."), MAX_SHOWN)
        return [f"{name}.{file.path}" for file in below if "/" not in file.path]

    def _folder(self, url: str) -> list[StoredFile]:
        """Return the files of an unpacked model, except for hidden files."""
        below = self._below(url.removeprefix(self._address))
        files = list(itertools.islice((f for f in below if is_clean(f.path)), MAX_FILES + 1))
        if len(files) > MAX_FILES:
            raise UrlNotAllowed(f"{url} has more than {MAX_FILES} files; use a .tar.gz")
        if any(file.path.count("/") >= MAX_DEPTH for file in files):
            raise UrlNotAllowed(f"{url} has files deeper than {MAX_DEPTH} folders")
        return files

    def _below(self, prefix: str) -> Iterator[StoredFile]:
        for file in self._bucket.list(prefix):
            yield replace(file, path=file.path.removeprefix(prefix))
