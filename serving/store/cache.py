"""Fetches models into a cache on disk, each version once; see `serving.store.cache_disk`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.model_files import is_model, model_folders
from common.trees import remove
from serving.errors import (
    ArchiveError,
    ArtifactChanged,
    DiskFull,
    ModelNotInStore,
    ModelTooLarge,
    ServingError,
    StoreAccessDenied,
)
from serving.store.archive import extract
from serving.store.cache_disk import CacheDisk, Reservation, megabytes
from serving.store.catalog import Remote, StoredModel, public_url
from serving.store.disk import LOCK_POLL_S, lock, raise_disk_full, walk
from serving.store.download import Download, Stopping
from serving.store.folder import closed_to_user, file_version
from serving.store.sources import Sources
from serving.store.stopping import Stop

logger = logging.getLogger(__name__)

# Time for which a version whose archive cannot be unpacked is not fetched again. Longer: an archive
# damaged during its download is unusable for longer. Shorter: more useless downloads.
BROKEN_S = 60.0
MAX_BROKEN = 1024  # versions
MAX_FULL_DISKS = 100  # attempts to fetch a model onto a full disk, each after an eviction


@dataclass(frozen=True)
class Fetched:
    """A fetched model's folder, and the bytes and seconds of its fetch.

    `hit`: it was in the cache. `unpack_s` is the time of unpacking after the end of the download.
    """

    path: Path
    hit: bool
    bytes: int = 0
    download_s: float = 0.0
    unpack_s: float = 0.0


class Cache:
    """A cache of models on disk. Thread-safe.

    `max_bytes` may be 0 for no limit; `model_max_bytes` limits an unpacked model. Raises
    `StartError` if the cache's folder cannot be used.
    """

    def __init__(
        self, sources: Sources, folder: Path, max_bytes: int, model_max_bytes: int
    ) -> None:
        self._sources, self._model_max_bytes = sources, model_max_bytes
        self._disk = CacheDisk(folder, max_bytes)
        self._pins: dict[Path, list[int]] = {}
        self._guard = threading.Lock()
        self._fetches: set[Stop] = set()  # stop the running fetches
        # Time until which a version is not fetched again, and its error, by key, the oldest first.
        self._broken: dict[str, tuple[float, type[ServingError], str]] = {}
        self._closed = False

    def acquire(self, model: StoredModel, stop: Stop | None = None) -> Fetched:
        """Fetch a model if it is not in the cache; return its folder, pinned until `release`.

        Waits if another thread or process is fetching the model. A folder of this machine is used
        in place. Raises `ArchiveError`, `ArtifactChanged`, `DiskFull`, `ModelTooLarge`,
        `ModelNotInStore`, `StoreUnavailable`, `StoreAccessDenied`, `Unavailable` if another process
        holds a lock of the cache for too long; `Stopping` soon after `stop` is set.
        """
        if model.in_place:
            if not Path(model.url).is_dir():
                raise ModelNotInStore(f"there is no folder {model.url}")
            return Fetched(Path(model.url), hit=True)
        with self._ended_by(stop or Stop()) as stopping, stopping.covers():
            reservation = Reservation(self._disk, model.key, stopping)
            for _ in range(MAX_FULL_DISKS):
                try:
                    with raise_disk_full(model.name):
                        return self._acquire(model, reservation)
                except DiskFull as error:
                    if error.missing_bytes:
                        raise
                reservation.retry()
        raise DiskFull(f"the disk is full; {model.name} does not fit")

    def _acquire(self, model: StoredModel, reservation: Reservation) -> Fetched:
        path = self._disk.models / model.key
        pin = self._disk.pin(model.key, reservation.stopping)
        try:
            hit = Fetched(path, hit=True) if path.is_dir() else None
            fetched = hit or self._fetch_once(model, reservation)
            _touch(path)
        except BaseException as error:
            os.close(pin)
            if isinstance(error, ArchiveError | ArtifactChanged | ModelTooLarge):
                self._disk.remove_if_unused(model.key)  # its lock files
            raise
        with self._guard:
            self._pins.setdefault(path, []).append(pin)
        return fetched

    def holds(self, model: StoredModel) -> bool:
        """Return whether the cache has the model, so that `acquire` fetches nothing."""
        return (self._disk.models / model.key).is_dir()

    def release(self, path: Path, *, discard: bool = False) -> None:
        """Release the folder of one `acquire`, which may then be evicted.

        With `discard` it is removed at once, unless it is still in use, or this process has fetched
        it: fetching the same version again would give the same files.
        """
        with self._guard:
            pins = self._pins.get(path)
            if not pins:  # a folder in place
                return
            pin = pins.pop()
            if not pins:
                del self._pins[path]
        with contextlib.suppress(OSError):
            _touch(path)
        os.close(pin)
        if discard and path.name not in self._disk.published:
            self._disk.remove_if_unused(path.name)

    def used_bytes(self) -> int:
        """Return the size of the cache on disk, including what running fetches have reserved."""
        return sum(self._disk.sizes().values())

    def close(self) -> None:
        """Stop all fetches, which raise `Stopping`. The next process resumes their downloads."""
        with self._guard:
            self._closed = True
            for stopping in self._fetches:
                stopping.set()

    # Fetching

    @contextlib.contextmanager
    def _ended_by(self, stopping: Stop) -> Iterator[Stop]:
        with self._guard:
            self._fetches.add(stopping)
            if self._closed:
                stopping.set()
        try:
            yield stopping
        finally:
            with self._guard:
                self._fetches.discard(stopping)

    def _fetch_once(self, model: StoredModel, reservation: Reservation) -> Fetched:
        key = model.key
        with self._fetching(key, reservation.stopping) as reservation.descriptor:
            if (self._disk.models / key).is_dir():
                return Fetched(self._disk.models / key, hit=True)
            self._raise_if_broken(key)
            try:
                return self._fetch(model, reservation)
            except (ArchiveError, ArtifactChanged, ModelTooLarge) as error:
                remove(self._disk.parts / key)
                if not isinstance(error, ArtifactChanged):
                    self._note_broken(key, error)
                raise
            finally:
                remove(self._disk.temporary / key)
                os.ftruncate(reservation.descriptor, 0)

    @contextlib.contextmanager
    def _fetching(self, key: str, stopping: Stop) -> Iterator[int]:
        """Wait for a model's fetch lock and hold it; yield its file descriptor."""
        while (descriptor := lock(self._disk.fetch_lock(key))) is None:
            stopping.waits_for = self._disk.fetch_lock(key)
            if stopping.wait(LOCK_POLL_S):
                raise Stopping("the fetch was stopped")
        stopping.waits_for = None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _raise_if_broken(self, key: str) -> None:
        until, kind, reason = self._broken.get(key, (0.0, ServingError, ""))
        if time.monotonic() < until:
            raise kind(reason)

    def _note_broken(self, key: str, error: ServingError) -> None:
        with self._guard:
            self._broken.pop(key, None)
            self._broken[key] = time.monotonic() + BROKEN_S, type(error), error.message
            if len(self._broken) > MAX_BROKEN:
                del self._broken[next(iter(self._broken))]

    def _fetch(self, model: StoredModel, reservation: Reservation) -> Fetched:
        most = self._model_max_bytes
        if model.size_bytes > most:
            raise ArchiveError(
                f"{model.name} has {megabytes(model.size_bytes)}, at most {megabytes(most)} are"
                " allowed (MODEL_MAX_MIB)"
            )
        started = time.monotonic()
        fresh = self._disk.temporary / model.key
        remove(fresh)
        fresh.mkdir()
        remote = self._sources.remote(model)
        downloaded, download_s = 0, 0.0
        if remote is None:
            self._unpack_local(model, fresh, reservation)
        else:
            downloaded, download_s = self._download(remote, model, fresh, reservation)
        path = self._disk.publish(model.key)
        remove(self._disk.parts / model.key)
        unpack_s = time.monotonic() - started - download_s
        logger.info(
            "fetched %s: %.1f MB downloaded in %.2f s, unpacked after %.2f s more",
            public_url(model.url), downloaded / 1e6, download_s, unpack_s,
        )  # fmt: skip
        return Fetched(path, False, downloaded, download_s, unpack_s)

    def _unpack_local(self, model: StoredModel, fresh: Path, reservation: Reservation) -> None:
        try:
            if not Path(model.url).is_file():
                raise ModelNotInStore(f"there is no archive {model.url}")
            archive = open(model.url, "rb")  # noqa: SIM115 (closed below)
        except PermissionError as error:
            raise StoreAccessDenied(closed_to_user(error)) from None
        with archive:
            if file_version(os.fstat(archive.fileno())) != model.version:
                raise ArtifactChanged(f"{model.url} has changed; try again")
            self._extract(archive, fresh, Path(model.url).name, reservation)

    def _download(
        self, remote: Remote, model: StoredModel, fresh: Path, reservation: Reservation
    ) -> tuple[int, float]:
        """Download and unpack a model into `fresh`; return the download's bytes and seconds."""
        parts = self._disk.parts / model.key
        reservation.grow(model.size_bytes, parts)
        with Download(remote, remote.files(model), parts, reservation.stopping) as download:
            if model.kind == "archive":
                with download.reader() as stream:
                    name = public_url(model.url).rpartition("/")[2]
                    self._extract(stream, fresh, name, reservation)
            download.wait()
        if model.kind == "folder":
            os.rename(download.folder, fresh)
        return download.missing_bytes, download.seconds

    def _extract(self, stream: IO[bytes], fresh: Path, name: str, reservation: Reservation) -> None:
        extract(stream, fresh, name, self._model_max_bytes, reservation.grow)
        if all(path.is_dir() for path in fresh.iterdir()):
            paths = [entry.path.removeprefix(f"{fresh}/") for entry in walk(fresh)]
            # MMS's model archiver puts all files of a .tgz into one folder; MMS accepts that.
            of_mms = any(path.endswith("/MAR-INF/MANIFEST.json") for path in paths)
            if not (of_mms or is_model(paths)) and (folders := model_folders(paths)):
                raise ArchiveError(
                    f"{name} holds its model in a folder, {min(folders)}/: pack what is in the"
                    f" folder (tar -czf {name} -C {min(folders)} .), or use kogpt2 package"
                )


def _touch(path: Path) -> None:
    """Set the time of last use. The kernel's own time stamps are some milliseconds apart."""
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))
