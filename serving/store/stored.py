"""Models as a store offers them: names, versions, and which files make a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from serving.names import SUFFIXES, archive_spellings, is_clean, normal_name, spellings

# A folder is a model if one of these is in it, or a file that ends with one of WEIGHTS.
SCRIPTS = ("code/inference.py", "inference.py", "MAR-INF/MANIFEST.json")
WEIGHTS = (
    ".params",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Or one of these: tensors in, tensors out (handlers.tensor_files knows which count).
TENSORS = re.compile(r"(model/)?model-symbol\.json|([0-9]+/)?model\.onnx")


@dataclass(frozen=True)
class StoredModel:
    """A model that can be fetched. `url` is a path where it is on this machine's disk."""

    name: str
    url: str
    version: str
    size_bytes: int
    kind: Literal["archive", "folder"]


@dataclass(frozen=True)
class StoredFile:
    """A file of a store. `path` is relative to the store, or to the model's folder."""

    path: str
    address: str
    size_bytes: int
    version: str


class Store(Protocol):
    """Offers models by name."""

    location: str

    def models(self) -> list[StoredModel]:
        """All of them, by name. Raises `StoreUnavailable`, `StoreAccessDenied`."""

    def find(self, name: str) -> StoredModel:
        """One, with or without `.tar.gz` or `.mar`, without listing the store.

        Raises `ModelNotInStore`, `UrlNotAllowed` for what cannot be a name, and what `models`
        raises.
        """


class Remote(Protocol):
    """Where files are read from over the network, from several threads at once."""

    ranged: bool  # whether `read` can start anywhere

    def files(self, model: StoredModel) -> list[StoredFile]:
        """The model's files, paths relative to its folder; one for an archive.

        Raises `ArtifactChanged` if this is no longer `model.version`.
        """

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to before `stop`.

        Raises `ArtifactChanged` if it is no longer `file.version`, `StoreUnavailable` if it breaks
        off, `StoreAccessDenied`, `ModelNotInStore`.
        """


def is_model(paths: Iterable[str]) -> bool:
    """Whether a folder with these files, relative to it, is a model."""
    return any(
        path in SCRIPTS
        or ("/" not in path and path.endswith(WEIGHTS))
        or TENSORS.fullmatch(path) is not None
        for path in paths
    )


def folder_version(files: Iterable[StoredFile]) -> str:
    """Changes when any file does."""
    lines = sorted(f"{file.path}\0{file.size_bytes}\0{file.version}" for file in files)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def folder_model(name: str, url: str, files: list[StoredFile]) -> StoredModel:
    """An unpacked model of these files, paths relative to its folder."""
    size_bytes = sum(file.size_bytes for file in files)
    return StoredModel(name, url, folder_version(files), size_bytes, "folder")


def models_among(files: Iterable[StoredFile], url: Callable[[str], str]) -> list[StoredModel]:
    """The models that a listing shows: archives and unpacked folders, by name, nested ones too.

    `url` makes a model's url from its path in the store. Where a name has both, the archive
    counts.
    """
    shown = [file for file in files if is_clean(file.path)]
    folders: dict[str, list[StoredFile]] = {root: [] for root in _roots(f.path for f in shown)}
    found: dict[str, StoredModel] = {}  # by path in the store
    for file in shown:
        root = next((parent for parent in _parents(file.path) if parent in folders), None)
        if root is not None:
            path = file.path.removeprefix(root + "/")
            folders[root].append(StoredFile(path, file.address, file.size_bytes, file.version))
        elif file.path.endswith(SUFFIXES):
            name, address = normal_name(file.path), url(file.path)
            found[file.path] = StoredModel(name, address, file.version, file.size_bytes, "archive")
    for root, content in folders.items():
        found[root] = folder_model(normal_name(root), url(root + "/"), content)
    names = sorted({model.name for model in found.values()})
    # As `Store.find` looks for them.
    first = (
        next((path for path in (*archive_spellings(n), *spellings(n)) if path in found), None)
        for n in names
    )
    return [found[path] for path in first if path is not None]


def _roots(paths: Iterable[str]) -> list[str]:
    """The topmost folders that are models."""
    roots = set()
    for path in paths:
        parent, _, last = path.rpartition("/")
        if last.endswith(WEIGHTS):
            roots.add(parent)
        for script in SCRIPTS:
            if path.endswith("/" + script):
                roots.add(path.removesuffix("/" + script))
        if last == "model.onnx":
            roots.add(
                parent.rpartition("/")[0] if parent.rpartition("/")[2].isdecimal() else parent
            )
        if last == "model-symbol.json":
            roots.add(parent.removesuffix("/model"))
    roots.discard("")
    return [root for root in roots if not any(parent in roots for parent in _parents(root))]


def _parents(path: str) -> Iterator[str]:
    """`a/b/c` has `a` and `a/b`."""
    for i, character in enumerate(path):
        if character == "/":
            yield path[:i]
