"""Fetched and unpacked models on disk: each version once, within a bound.

    models/<key>      complete: put there by a rename
    parts/<key>       a download, also one that was cut short
    temporary/<key>   being unpacked or removed; rubbish after a kill
    locks/<key>.pin   held shared by who uses or fetches the model, exclusively by who removes it
    locks/<key>.fetch held by who fetches it; says how many bytes that takes
    lock              held while room is made

A key is made of url and version. Several processes may share a cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.model_files import is_model, model_folders
from common.trees import remove
from serving.errors import (
    ArchiveError,
    ArtifactChanged,
    DiskFull,
    ModelNotInStore,
    ModelTooLarge,
    ServingError,
    StartError,
)
from serving.store.archive import Readable, extract
from serving.store.catalog import Remote, Store, StoredModel, public_url
from serving.store.disk import full_disk_is_an_error_of_ours, lock, locked, size_bytes, walk
from serving.store.download import Download, Stopping
from serving.store.folder import file_version
from serving.store.locate import open_remote, open_store
from serving.store.settings import StoreSettings
from serving.store.stopping import Stop

logger = logging.getLogger(__name__)

# The bound is exceeded by at most one part in so many for each fetch.
STEPS = 1000
STEP_BYTES = 4 << 20  # where there is no bound
# An archive that cannot be unpacked is not fetched again for so long, while its version is the
# same: it may have been damaged on the way.
BROKEN_S = 60.0
MAX_BROKEN = 1024
LOOK_AGAIN_S = 0.05
# Attempts to fetch a model onto a full disk: before each further one others are removed.
MAX_FULL_DISKS = 100


@dataclass(frozen=True)
class Fetched:
    """A model's folder. `hit`: nothing was fetched. Unpacking goes on while downloading;
    `unpack_s` is what it takes longer."""

    path: Path
    hit: bool
    bytes: int = 0
    download_s: float = 0.0
    unpack_s: float = 0.0


class Cache:
    """Thread-safe. Raises `StartError` if its folder cannot be used."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings, self._root = settings, settings.cache_dir
        self._step_bytes = settings.cache_max_bytes // STEPS or STEP_BYTES
        self._models, self._parts = self._root / "models", self._root / "parts"
        self._temporary, self._locks = self._root / "temporary", self._root / "locks"
        self._pins: dict[Path, list[int]] = {}
        self._guard = threading.Lock()
        self._store: Store | None = None
        self._fetches: set[Stop] = set()  # what ends each of them
        self._fetched: set[str] = set()  # keys of what this process has fetched
        # By key, in order: until when, and why.
        self._broken: dict[str, tuple[float, type[ServingError], str]] = {}
        self._closed = False
        try:
            for folder in (self._models, self._parts, self._temporary, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
        except OSError as error:
            raise StartError(f"the model cache {self._root} cannot be used: {error}") from None

    def acquire(self, model: StoredModel, given_up: Stop | None = None) -> Fetched:
        """The model's folder, fetched if it is not there, and kept until `release`.

        Whoever asks for a model that another thread or process fetches waits for that. A folder of
        this machine is used in place. Raises `ArchiveError`, `ArtifactChanged`, `DiskFull`,
        `ModelTooLarge`, `ModelNotInStore`, `StoreUnavailable`, `StoreAccessDenied`; `Stopping` soon
        after `given_up` is set.
        """
        if model.kind == "folder" and "://" not in model.url:
            if not Path(model.url).is_dir():
                raise ModelNotInStore(f"there is no folder {model.url}")
            return Fetched(Path(model.url), hit=True)
        with self._ended_by(given_up or Stop()) as stopping, stopping.covers():
            reservation = _Reservation(self, model.key, self._step_bytes, stopping)
            for _ in range(MAX_FULL_DISKS):
                try:
                    with full_disk_is_an_error_of_ours(model.name):
                        return self._acquire(model, reservation)
                except DiskFull as error:
                    if error.missing_bytes:
                        raise
                reservation.retry()
        raise DiskFull(f"the disk is full; {model.name} does not fit")

    def _acquire(self, model: StoredModel, reservation: _Reservation) -> Fetched:
        path = self._models / model.key
        pin = lock(self._pin(model.key), shared=True)
        assert pin is not None
        try:
            hit = Fetched(path, hit=True) if path.is_dir() else None
            fetched = hit or self._fetch_once(model, reservation)
            _touch(path)
        except BaseException:
            os.close(pin)
            raise
        with self._guard:
            self._pins.setdefault(path, []).append(pin)
        return fetched

    def holds(self, model: StoredModel) -> bool:
        """Whether it is there already."""
        return (self._models / model.key).is_dir()

    def release(self, path: Path, *, discard: bool = False) -> None:
        """Gives back what one `acquire` returned; from now on it may be removed for others.

        With `discard` it is removed at once, unless it is in use, or was fetched by this process:
        fetching the same version again would bring the same.
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
        if path.name in self._fetched or not discard:
            return
        if (alone := self._pin_alone(path.name)) is not None:
            self._remove(path.name)
            os.close(alone)

    def used_bytes(self) -> int:
        """On disk, and reserved by what is being fetched."""
        return sum(self._sizes().values())

    def close(self) -> None:
        """Ends fetches; they raise `Stopping`, and the next process resumes downloads."""
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

    def _fetch_once(self, model: StoredModel, reservation: _Reservation) -> Fetched:
        key = model.key
        with self._fetching(key, reservation.stopping) as reservation.descriptor:
            if (self._models / key).is_dir():
                return Fetched(self._models / key, hit=True)
            self._raise_if_broken(key)
            try:
                return self._fetch(model, key, reservation)
            except (ArchiveError, ArtifactChanged, ModelTooLarge) as error:
                remove(self._parts / key)
                if not isinstance(error, ArtifactChanged):
                    self._note_broken(key, error)
                raise
            finally:
                remove(self._temporary / key)
                os.ftruncate(reservation.descriptor, 0)

    @contextlib.contextmanager
    def _fetching(self, key: str, stopping: Stop) -> Iterator[int]:
        """Waits while another thread or process fetches it; yields the lock's descriptor."""
        while (descriptor := lock(self._fetch_lock(key), wait=False)) is None:
            if stopping.wait(LOOK_AGAIN_S):
                raise Stopping("the fetch was given up")
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

    def _fetch(self, model: StoredModel, key: str, reservation: _Reservation) -> Fetched:
        most = self._settings.model_max_bytes
        if model.size_bytes > most:
            raise ArchiveError(
                f"{model.name} has {_mb(model.size_bytes)}, at most {_mb(most)} are taken"
                " (MODEL_MAX_MIB)"
            )
        started = time.monotonic()
        fresh = self._temporary / key
        remove(fresh)
        fresh.mkdir()
        remote = self._remote(model)
        downloaded, download_s = 0, 0.0
        if remote is None:
            self._unpack_local(model, fresh, reservation)
        else:
            downloaded, download_s = self._download(remote, model, key, fresh, reservation)
        os.rename(fresh, self._models / key)
        self._fetched.add(key)
        remove(self._parts / key)
        unpack_s = time.monotonic() - started - download_s
        logger.info(
            "fetched %s: %.1f MB downloaded in %.2f s, unpacked after %.2f s more",
            public_url(model.url), downloaded / 1e6, download_s, unpack_s,
        )  # fmt: skip
        return Fetched(self._models / key, False, downloaded, download_s, unpack_s)

    def _remote(self, model: StoredModel) -> Remote | None:
        with self._guard:
            if self._store is None and not model.url.startswith(("/", "http://", "https://")):
                self._store = open_store(self._settings.location)
        return open_remote(model, self._store, self._settings)

    def _unpack_local(self, model: StoredModel, fresh: Path, reservation: _Reservation) -> None:
        if not Path(model.url).is_file():
            raise ModelNotInStore(f"there is no archive {model.url}")
        with open(model.url, "rb") as archive:
            if file_version(os.fstat(archive.fileno())) != model.version:
                raise ArtifactChanged(f"{model.url} has changed; try again")
            self._extract(archive, fresh, Path(model.url).name, reservation)

    def _download(
        self, remote: Remote, model: StoredModel, key: str, fresh: Path, reservation: _Reservation
    ) -> tuple[int, float]:
        """Leaves the model in `fresh`; returns bytes and seconds."""
        reservation.grow(model.size_bytes, self._parts / key)
        download = Download(remote, remote.files(model), self._parts / key, reservation.stopping)
        with download:
            if model.kind == "archive":
                with download.reader() as stream:
                    name = public_url(model.url).rpartition("/")[2]
                    self._extract(stream, fresh, name, reservation)
            download.wait()
        if model.kind == "folder":
            os.rename(download.folder, fresh)
        return download.missing_bytes, download.seconds

    def _extract(self, stream: Readable, fresh: Path, name: str, reservation: _Reservation) -> None:
        extract(stream, fresh, name, self._settings.model_max_bytes, reservation.grow)
        if all(path.is_dir() for path in fresh.iterdir()):
            paths = [entry.path.removeprefix(f"{fresh}/") for entry in walk(fresh)]
            # MMS's model archiver puts all of a .tgz one folder down, which its models may have.
            of_mms = any(path.endswith("/MAR-INF/MANIFEST.json") for path in paths)
            if not (of_mms or is_model(paths)) and (folders := model_folders(paths)):
                raise ArchiveError(
                    f"{name} holds its model in a folder, {min(folders)}/: pack what is in the"
                    f" folder (tar -czf {name} -C {min(folders)} .), or use kogpt2 package"
                )

    # Room

    def make_room(
        self, key: str, wanted: int, growth: int, keep: Callable[[], object], least: int = 0
    ) -> None:
        """Removes the least recently used models nobody uses until `wanted` bytes for `key` fit.

        `growth` of them are not on the disk yet. At least `least` bytes are freed. Calls `keep`
        while no other can make room. Raises `DiskFull`, and then removes nothing, or
        `ModelTooLarge`.
        """
        most = self._settings.cache_max_bytes
        if most and wanted > most:
            raise ModelTooLarge(
                f"the model needs {_mb(wanted)} on disk, more than the whole cache: {_mb(most)}"
            )
        with locked(self._root / "lock"):
            others = {k: size for k, size in self._sizes().items() if k != key}
            over = sum(others.values()) + wanted - most if most else 0
            missing = max(over, growth - shutil.disk_usage(self._root).free, least)
            if missing > 0:
                self._evict(others, missing, wanted)
            keep()

    def _evict(self, sizes: dict[str, int], missing: int, wanted: int) -> None:
        victims: list[tuple[str, int]] = []
        try:
            freed = 0
            for key in sorted(sizes, key=self._last_used):
                if freed >= missing:
                    break
                pin = self._pin_alone(key) if sizes[key] else None
                if pin is not None:
                    victims.append((key, pin))
                    freed += sizes[key]
            if freed < missing:
                raise DiskFull(
                    f"the model needs {_mb(wanted)} on disk; {_mb(missing - freed)} of it are in"
                    " use by models that are loaded or being fetched",
                    missing_bytes=missing - freed,
                )
            for key, _ in victims:
                logger.info("removing %s from the cache: %s", key, _mb(sizes[key]))
                self._remove(key)
        finally:
            for _, pin in victims:
                os.close(pin)

    def _remove(self, key: str) -> None:
        """The caller holds the pin exclusively. A kill in between leaves no half model."""
        self._fetched.discard(key)
        remove(self._temporary / key)
        try:
            os.rename(self._models / key, self._temporary / key)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s in the cache cannot be removed: %s", key, error)
            return
        self._remove_all(key, self._temporary / key, self._parts / key)

    def _remove_leftovers(self) -> None:
        """What a killed process left, but for downloads, which can be resumed."""
        with locked(self._root / "lock"):
            for key in {path.name for path in self._temporary.iterdir()} | self._locked_keys():
                pin = self._pin_alone(key)
                if pin is not None:
                    self._remove_all(key, self._temporary / key)
                    os.close(pin)

    def _pin_alone(self, key: str) -> int | None:
        """None for what is in use, or is not of our making."""
        try:
            return lock(self._pin(key), wait=False)
        except OSError as error:
            logger.warning("%s in the cache is left as it is: %s", key, error)
            return None

    def _remove_all(self, key: str, *folders: Path) -> None:
        for path in (*folders, self._fetch_lock(key), self._pin(key)):
            remove(path)

    def _sizes(self) -> dict[str, int]:
        """Bytes by key."""
        names = {path.name for folder in (self._models, self._parts) for path in folder.iterdir()}
        return {key: self._size(key) for key in names | self._locked_keys()}

    def _size(self, key: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._fetch_lock(key).read_text("ascii"))
        return size_bytes(self._models / key) + size_bytes(self._parts / key)

    def _last_used(self, key: str) -> int:
        for path in (self._models / key, self._parts / key):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime_ns
        return 0

    def _locked_keys(self) -> set[str]:
        return {path.stem for path in self._locks.iterdir()}

    def _pin(self, key: str) -> Path:
        return self._locks / f"{key}.pin"

    def _fetch_lock(self, key: str) -> Path:
        return self._locks / f"{key}.fetch"


class _Reservation:
    """What one fetch takes on disk, written into its lock for all processes to see."""

    def __init__(self, cache: Cache, key: str, step_bytes: int, stopping: Stop) -> None:
        self._cache, self._key = cache, key
        self.descriptor = -1  # of the lock
        self.stopping = stopping
        # An archive of many small files does not ask for each: that would take long.
        self._step = step_bytes
        self._wanted = self._granted = 0
        self._resumed: Path | None = None

    def grow(self, size: int, resumed: Path | None = None) -> None:
        """`resumed` holds a part of it already.

        Raises `DiskFull`, `ModelTooLarge`, `Stopping`.
        """
        if self.stopping.is_set():
            raise Stopping("the fetch was given up")
        self._wanted += size
        self._resumed = resumed or self._resumed
        if self._wanted - self._granted > self._step:
            self._cache.make_room(self._key, self._wanted, self._growth(self._granted), self._write)

    def retry(self) -> None:
        """Makes room for a further attempt: the disk was full before the reservation was.

        Each attempt removes a model at least, or raises `DiskFull`.
        """
        self._cache.make_room(self._key, self._wanted, self._growth(0), lambda: None, least=1)
        self._wanted = self._granted = 0

    def _growth(self, granted: int) -> int:
        on_disk = size_bytes(self._resumed, allocated=True) if self._resumed else 0
        return max(self._wanted - granted - on_disk, 0)

    def _write(self) -> None:
        self._granted = self._wanted
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, b"%d" % self._granted, 0)


def _touch(path: Path) -> None:
    """The time as exact as it can be: the kernel's own stamps are some milliseconds apart."""
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
