"""Opens the store, and locates the models that load requests name: in it, or by an allowed url."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from serving.errors import StartError, UrlNotAllowed
from serving.store.catalog import OBJECTS, Remote, Store, StoredModel, public_url
from serving.store.drivers import DriverBucket
from serving.store.folder import FolderStore, find_path
from serving.store.https import Https
from serving.store.objects import Bucket, ObjectStore
from serving.store.root_files import SCHEME, RootFiles


def open_store(location: str) -> Store:
    """Open the store at `s3://bucket/prefix/`, `abfs://`, `gs://`, `file:///path` or a path.

    Sends no request to it. Raises `StartError` or `SettingError`.
    """
    if (scheme := _scheme(location)) in OBJECTS:
        name, _, prefix = location.removeprefix(f"{scheme}://").partition("/")
        if not name:
            raise StartError(
                f"MODEL_STORE is {location}: name the bucket, {scheme}://bucket/prefix/"
            )
        bucket: Bucket
        if scheme == "s3":
            from serving.store.s3 import S3Bucket  # boto3 only where it is used: it takes 0.3 s

            bucket = S3Bucket(name)
        else:
            bucket = DriverBucket(scheme, name)
        return ObjectStore(bucket, f"{scheme}://{name}/", prefix)
    path = _local_path(location)
    if path is None:
        known = ", ".join(f"{known}://" for known in (*OBJECTS, "file"))
        raise StartError(f"MODEL_STORE is {location}; it may be a folder or {known}")
    return FolderStore(path)


@dataclass(frozen=True)
class Sources:
    """The store, and the places beside it whose models may be loaded.

    `roots` are folders whose models may be loaded by path, and `https_hosts` the hosts to download
    from, as `host` or `host:port`. `root_files` reads models of `roots` that only root may read.
    """

    store: Store
    roots: tuple[Path, ...] = ()
    https_hosts: tuple[str, ...] = ()
    root_files: RootFiles | None = None

    def locate(self, url: str, handler: str | None = None) -> StoredModel:
        """Return the model that a load request names: in the store, or by an allowed url.

        `handler` is from the request, too. Raises `UrlNotAllowed` with a list of what is allowed,
        `ModelNotInStore`, and what `Store.find` raises.
        """
        scheme = _scheme(url)
        try:
            if scheme in OBJECTS and isinstance(self.store, ObjectStore):
                return self.store.locate(url, handler)
            if scheme in ("http", "https"):
                return Https(self.https_hosts).locate(url)
            if scheme == "file" or url.startswith("/"):
                path = _local_path(url)
                if path is not None:
                    closed = self.root_files and self.root_files.find(path)
                    return closed or find_path(path, self._folders())
            elif not scheme:
                return self.store.find(url, handler)
            raise UrlNotAllowed(f"{public_url(url)!r} cannot be loaded")
        except UrlNotAllowed as error:
            raise UrlNotAllowed(f"{error.message}. Allowed: {self._allowed()}") from None

    def is_here(self, url: str) -> bool:
        """Return whether `locate` reads this machine's disk only, not the network."""
        scheme = _scheme(url)
        own_name = not scheme and isinstance(self.store, FolderStore)
        return scheme == "file" or url.startswith("/") or own_name

    def remote(self, model: StoredModel) -> Remote | None:
        """Return the source of a model's files; None if `model.url` is a path.

        Raises `UrlNotAllowed` for a url in another bucket or prefix than the store's.
        """
        if model.is_local:
            return None
        scheme = _scheme(model.url)
        if scheme in OBJECTS:
            if isinstance(self.store, ObjectStore) and model.url.startswith(self.store.location):
                return self.store
            raise UrlNotAllowed(f"{public_url(model.url)} is outside of {self.store.location}")
        if scheme == SCHEME and self.root_files is not None:
            return self.root_files
        return Https(self.https_hosts)

    def _folders(self) -> tuple[Path, ...]:
        """Return the folders whose models may be loaded by path."""
        own = (self.store.root,) if isinstance(self.store, FolderStore) else ()
        return (*self.roots, *own)

    def _allowed(self) -> str:
        """Return a list of the allowed urls, as text for a message."""
        ways = [f"a name in the store {self.store.location}"]
        if isinstance(self.store, ObjectStore):
            ways.append(f"{self.store.location}<name>.tar.gz")
        ways += [f"a path below {folder}" for folder in self._folders()]
        ways += [f"https://{host}/..." for host in self.https_hosts]
        return "; ".join(ways)


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def _local_path(location: str) -> Path | None:
    """Return the path of a `file://` url or of a plain path; None for other urls."""
    if "://" not in location:
        return Path(location)
    try:
        parts = urlsplit(location)
    except ValueError:  # an incomplete IPv6 address
        return None
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path))
