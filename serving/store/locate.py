"""Opens stores by address, and locates the model of a load request's `url`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from serving.errors import StartError, UrlNotAllowed
from serving.store.catalog import Remote, Store, StoredModel, public_url
from serving.store.drivers import DRIVERS, DriverBucket
from serving.store.folder import FolderStore, find_path
from serving.store.https import Https
from serving.store.objects import Bucket, ObjectStore
from serving.store.root_files import SCHEME
from serving.store.settings import StoreSettings

OBJECTS = ("s3", *DRIVERS)


def open_store(location: str) -> Store:
    """Opens the store at `s3://bucket/prefix/`, `abfs://`, `gs://`, `file:///path` or a path.

    Sends no request to it. Raises `StartError` or `SettingError`.
    """
    scheme, separator, rest = location.partition("://")
    if separator and scheme in OBJECTS:
        name, _, prefix = rest.partition("/")
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


def open_remote(model: StoredModel, store: Store | None, settings: StoreSettings) -> Remote | None:
    """Returns the source of a model's files; None if `model.url` is a path.

    Raises `UrlNotAllowed` for a url in another bucket or prefix than the store's.
    """
    scheme, separator, _ = model.url.partition("://")
    if not separator:
        return None
    if scheme in OBJECTS:
        if isinstance(store, ObjectStore) and model.url.startswith(store.location):
            return store
        raise UrlNotAllowed(f"{public_url(model.url)} is outside of {settings.location}")
    if scheme == SCHEME and settings.root_files is not None:
        return settings.root_files
    return Https(settings.https_hosts)


def is_here(url: str, store: Store | None) -> bool:
    """Returns whether `locate` reads this machine's disk only, not the network."""
    scheme, separator, _ = url.partition("://")
    own_name = not separator and isinstance(store, FolderStore)
    return url.startswith("/") or (bool(separator) and scheme == "file") or own_name


def locate(
    url: str, store: Store | None, settings: StoreSettings, handler: str | None = None
) -> StoredModel:
    """Returns the model of a load request, whose `url` is a name in the store or an allowed url.

    `handler` is from the request, too. Raises `UrlNotAllowed` with a list of what is allowed,
    `ModelNotInStore`, and what `Store.find` raises.
    """
    scheme, separator, _ = url.partition("://")
    try:
        if separator and scheme in OBJECTS and isinstance(store, ObjectStore):
            return store.locate(url, handler)
        if separator and scheme in ("http", "https"):
            return Https(settings.https_hosts).locate(url)
        if url.startswith("/") or (separator and scheme == "file"):
            path = _local_path(url)
            if path is not None:
                if settings.root_files is not None and (model := settings.root_files.find(path)):
                    return model
                own = (store.root,) if isinstance(store, FolderStore) else ()
                return find_path(path, (*settings.roots, *own))
        elif not separator and store is not None:
            return store.find(url, handler)
        raise UrlNotAllowed(f"{public_url(url)!r} cannot be loaded")
    except UrlNotAllowed as error:
        raise UrlNotAllowed(f"{error.message}. Allowed: {_allowed(store, settings)}") from None


def _allowed(store: Store | None, settings: StoreSettings) -> str:
    """Returns a list of the allowed urls, as text for a message."""
    ways = [f"a name in the store {store.location}"] if store is not None else []
    if isinstance(store, ObjectStore):
        ways.append(f"{store.location}<name>.tar.gz")
    ways += [f"a path below {root}" for root in settings.roots]
    ways += [f"https://{host}/..." for host in settings.https_hosts]
    return "; ".join(ways) or "nothing, without a store"


def _local_path(location: str) -> Path | None:
    """Returns the path of a `file://` url or of a plain path; None for other urls."""
    if "://" not in location:
        return Path(location)
    try:
        parts = urlsplit(location)
    except ValueError:  # an incomplete IPv6 address
        return None
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path))
