"""Models and files of stores, and the protocols of stores."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from common.model_files import is_model, model_folders, parents, why_no_model
from serving.errors import NotAModel
from serving.names import SUFFIXES, archive_spellings, is_clean, normal_name, spellings

DRIVERS = {"abfs": "adlfs", "gs": "gcsfs"}  # schemes of object stores, and their fsspec drivers
OBJECTS = ("s3", *DRIVERS)  # whose urls have no secrets: `?`, `#` and `@` are parts of keys


@dataclass(frozen=True)
class StoredModel:
    """A version of a model that can be fetched. `url` is a path if it is on this machine's disk.

    `key` identifies the version in the cache: the model's name and a hash of url and version.
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

    @property
    def is_local(self) -> bool:
        """True for a file or folder of this machine."""
        return "://" not in self.url

    @property
    def in_place(self) -> bool:
        """True for a folder of this machine, which is used where it is, without a copy."""
        return self.is_local and self.kind == "folder"

    def without_secrets(self) -> StoredModel:
        """Return the model with a url without credentials, but with the same `key`."""
        url = public_url(self.url)
        return self if url == self.url else replace(self, url=url)


@dataclass(frozen=True)
class StoredFile:
    """A file of a store. `path` is relative to the store, or to the folder of a model."""

    path: str
    address: str
    size_bytes: int
    version: str


class Store(Protocol):
    """A place from which models are fetched by name."""

    location: str

    def models(self) -> list[StoredModel]:
        """List all models, sorted by name. Raises `StoreUnavailable`, `StoreAccessDenied`."""

    def find(self, name: str, handler: str | None = None) -> StoredModel:
        """Return a model without listing the store; `name` may end with `.tar.gz` or `.mar`.

        A folder counts as a model also if it has the file of `handler`, from a load request.
        Raises `ModelNotInStore`, `NotAModel`, `UrlNotAllowed` for an invalid name, and what
        `models` raises.
        """

    def file(self, path: str) -> StoredFile | None:
        """Return a file by its path in the store, or None. Raises what `models` raises."""

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        """See `Remote.read`."""


class Remote(Protocol):
    """A source of models whose files must be copied into the cache. Thread-safe."""

    ranged: bool  # whether `read` can start at any byte
    paced: bool  # whether `read` yields bytes as they arrive, so that their pace can be checked

    def files(self, model: StoredModel) -> list[StoredFile]:
        """Return the files of a model, with paths relative to its folder, or its one archive.

        Raises `ArtifactChanged` if the store has another version now.
        """

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` to before `stop`.

        Raises `ArtifactChanged` if the store has another version now, `StoreUnavailable` if the
        connection breaks off, `StoreAccessDenied`, `ModelNotInStore`.
        """


def public_url(url: str) -> str:
    """Remove user, password and query, which may be secret, from a url for logs and messages."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in (*OBJECTS, "file", "root"):
        return url
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def folder_version(files: Iterable[StoredFile]) -> str:
    """Return a hash of the files' paths, sizes and versions."""
    lines = sorted(f"{file.path}\0{file.size_bytes}\0{file.version}" for file in files)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def holds_model(files: Iterable[StoredFile], handler: str | None) -> bool:
    """Return whether a folder of these files is a model, with or without `handler`.

    A model without the handler's file is accepted, as its load fails with a better error.
    """
    paths = [file.path for file in files]
    return is_model(paths, handler) or is_model(paths)


def not_a_model(name: str, paths: Iterable[str], links: int = 0) -> NotAModel:
    return NotAModel(f"{name} in the store is no model: {why_no_model(paths, links)}")


def folder_model(name: str, url: str, files: list[StoredFile]) -> StoredModel:
    """Return an unpacked model of these files, whose paths are relative to its folder."""
    size_bytes = sum(file.size_bytes for file in files)
    return StoredModel(name, url, folder_version(files), size_bytes, "folder")


def models_among(files: Iterable[StoredFile], url: Callable[[str], str]) -> list[StoredModel]:
    """Return the models in a listing of files, sorted by name: archives and folders of any depth.

    url: converts a model's path in the store to its url
    An archive takes precedence over a folder of the same name.
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
