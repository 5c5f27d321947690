"""Reads `abfs://` and `gs://` with drivers of fsspec, which are optional (requirements/store.txt).

Drivers read their own environment variables, for example AZURE_STORAGE_CONNECTION_STRING or
GOOGLE_APPLICATION_CREDENTIALS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from serving.errors import (
    ArtifactChanged,
    ServingError,
    StartError,
    StoreAccessDenied,
    StoreUnavailable,
)
from serving.store.catalog import DRIVERS, StoredFile

DENIED = (401, 403)
# Time limits of a call and of the read of a range, including the driver's retries: without a limit,
# these may take minutes.
CALL_S, RANGE_S = 20.0, 60.0


class DriverBucket:
    """A container of Azure or a bucket of Google Cloud.

    Raises `StartError` if the driver is missing or not configured.
    """

    paced = False  # a range arrives as a whole

    def __init__(self, scheme: str, name: str) -> None:
        self._scheme, self._name = scheme, name
        try:
            import fsspec.asyn  # type: ignore[import-not-info, import-untyped, unused-ignore]

            self._sync = fsspec.asyn.sync
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            self._files = fsspec.filesystem(scheme, **options)
        except ImportError as error:
            raise StartError(
                f"{scheme}:// needs {DRIVERS[scheme]} ({error}):"
                " pip install -r requirements/store.txt"
            ) from None
        except Exception as error:
            raise StartError(f"{scheme}://{name} cannot be used: {error}") from error

    def head(self, key: str) -> StoredFile | None:
        try:
            with self._errors(key):
                info = self._call(self._files._info, f"{self._name}/{key}", refresh=True)
        except FileNotFoundError:
            return None
        return self._stored(key, info) if info["type"] == "file" else None

    def list(self, prefix: str) -> Iterator[StoredFile]:
        try:
            with self._errors(prefix):
                self._files.invalidate_cache()
                path = f"{self._name}/{prefix}".rstrip("/")
                below = self._call(self._files._find, path, detail=True)
        except FileNotFoundError:
            return
        for path, info in below.items():
            key = path.removeprefix(f"{self._name}/")
            if key.startswith(prefix):
                yield self._stored(key, info)

    def read(self, file: StoredFile, start: int, stop: int) -> Iterator[bytes]:
        try:
            with self._errors(file.address):
                path = f"{self._name}/{file.address}"
                data = self._call(
                    self._files._cat_file, path, timeout_s=RANGE_S, start=start, end=stop
                )
            info = self.head(file.address)
        except FileNotFoundError:
            info = None
        # Versions are never reused, so the same version after the read means an unchanged file.
        if info is None or info.version != file.version:
            raise ArtifactChanged(f"{self._scheme}://{self._name}/{file.address} has changed")
        yield data

    def _call(
        self, method: Callable[..., Any], path: str, timeout_s: float = CALL_S, **options: Any
    ) -> Any:
        """Run one of the driver's asynchronous methods, from any thread."""
        return self._sync(self._files.loop, method, path, timeout=timeout_s, **options)

    def _stored(self, key: str, info: Mapping[str, Any]) -> StoredFile:
        changed = info.get("etag") or info.get("last_modified") or info.get("mtime")
        return StoredFile(key, key, int(info["size"]), str(changed).strip('"'))

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Convert the errors of drivers, whose types are undocumented, to `ServingError`s."""
        where = f"{self._scheme}://{self._name}/{key}"
        try:
            yield
        except (FileNotFoundError, ServingError):
            raise
        except Exception as error:
            status = getattr(error, "status_code", None) or getattr(error, "code", None)
            reason = str(error).partition("\n")[0] or type(error).__name__
            if isinstance(error, PermissionError) or status in DENIED:
                raise StoreAccessDenied(f"{where}: access was denied: {reason}") from error
            raise StoreUnavailable(f"{where} cannot be read: {reason}") from error
