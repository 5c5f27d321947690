"""Models of a store: their names, versions and files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from common.model_files import is_model, model_folders, parents, why_no_model
from serving.errors import NotAModel
from serving.names import SUFFIXES, archive_spellings, is_clean, normal_name, spellings


@dataclass(frozen=True)
class StoredModel:
    """A model that can be fetched. `url` is a path if it is on this machine's disk.

    `key` is the version's name in the cache: the model's name and a hash of url and version.
    """

    name: str
    url: str
    version: str
    size_bytes: int
    kind: Literal["archive", "folder"]
    key: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            text = f"{self.url}\n{self.version}".encode("utf-8", "surrogateescape")
            readable = re.sub(r"[^\w-]", "_", self.name)[-50:]
            key = f"{readable}-{hashlib.sha256(text).hexdigest()[:24]}"
            object.__setattr__(self, "key", key)

    def without_secrets(self) -> StoredModel:
        """The model with the credentials of its url removed; the same `key` in the cache."""
        url = public_url(self.url)
        return self if url == self.url else replace(self, url=url)


@dataclass(frozen=True)
class StoredFile:
    """A file of a store. `path` is relative to the store, or to the model's folder."""

    path: str
    address: str
    size_bytes: int
    version: str


class Store(Protocol):
    """A place with models by name."""

    location: str

    def models(self) -> list[StoredModel]:
        """All of them, by name. Raises `StoreUnavailable`, `StoreAccessDenied`."""

    def find(self, name: str, handler: str | None = None) -> StoredModel:
        """One model, without listing the store; `name` may end with `.tar.gz` or `.mar`.

        A folder with the file of `handler`, which a load request names, is a model, too.
        Raises `ModelNotInStore`, `NotAModel`, `UrlNotAllowed` for an invalid name, and what
        `models` raises.
        """

    def file(self, path: str) -> StoredFile | None:
        """A file beside the models, None where there is none. Raises what `models` raises."""

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        """See `Remote.read`."""


class Remote(Protocol):
    """A store over the network. Thread-safe."""

    ranged: bool  # whether `read` can start at any byte
    paced: bool  # whether `read` yields bytes as they arrive, so that their pace can be checked

    def files(self, model: StoredModel) -> list[StoredFile]:
        """The model's files, paths relative to its folder; one for an archive.

        Raises `ArtifactChanged` if this is no longer `model.version`.
        """

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to before `stop`.

        Raises `ArtifactChanged` if it is no longer `file.version`, `StoreUnavailable` if it breaks
        off, `StoreAccessDenied`, `ModelNotInStore`.
        """


def public_url(url: str) -> str:
    """The url for logs and messages: without user, password and query, which may be secret."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("s3", "abfs", "gs", "file", "root"):
        return url
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def folder_version(files: Iterable[StoredFile]) -> str:
    """A hash of the files' names, sizes and versions."""
    lines = sorted(f"{file.path}\0{file.size_bytes}\0{file.version}" for file in files)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def holds_model(files: Iterable[StoredFile], handler: str | None) -> bool:
    """Whether a folder of these files is a model, with or without `handler`.

    If only without, its load fails with the error that the handler is missing.
    """
    paths = [file.path for file in files]
    return is_model(paths, handler) or is_model(paths)


def not_a_model(name: str, paths: Iterable[str], links: int = 0) -> NotAModel:
    return NotAModel(f"{name} in the store is no model: {why_no_model(paths, links)}")


def folder_model(name: str, url: str, files: list[StoredFile]) -> StoredModel:
    """An unpacked model with these files, paths relative to its folder."""
    size_bytes = sum(file.size_bytes for file in files)
    return StoredModel(name, url, folder_version(files), size_bytes, "folder")


def models_among(files: Iterable[StoredFile], url: Callable[[str], str]) -> list[StoredModel]:
    """The models in a listing of files, sorted by name: archives and folders, at any depth.

    `url` makes a model's url from its path in the store. An archive takes precedence over a folder
    of the same name.
    """
    shown = [file for file in files if is_clean(file.path)]
    folders: dict[str, list[StoredFile]] = {
        root: [] for root in model_folders(f.path for f in shown)
    }
    models: dict[str, StoredModel] = {}  # by path in the store
    for file in shown:
        root = next((parent for parent in parents(file.path) if parent in folders), None)
        if root is not None:
            folders[root].append(replace(file, path=file.path.removeprefix(root + "/")))
        elif file.path.endswith(SUFFIXES):
            name, address = normal_name(file.path), url(file.path)
            models[file.path] = StoredModel(name, address, file.version, file.size_bytes, "archive")
    for root, content in folders.items():
        models[root] = folder_model(normal_name(root), url(root + "/"), content)
    names = sorted({model.name for model in models.values()})
    # The same precedence as `Store.find`.
    first = (
        next((path for path in (*archive_spellings(n), *spellings(n)) if path in models), None)
        for n in names
    )
    return [models[path] for path in first if path is not None]
