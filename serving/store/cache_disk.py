"""The files of the cache: folders, locks, sizes and eviction.

    models/<key>      a complete model, put there by a rename
    fetched/<key>     the boot in which the model was fetched, then SYNCED
    parts/<key>       a running or interrupted download
    temporary/<key>   a model being unpacked or removed; garbage after a kill
    locks/<key>.pin   locked shared while the model is used or fetched, exclusively for its removal
    locks/<key>.fetch locked during the model's fetch; contains the number of reserved bytes
    lock              locked during an eviction

A key is unique for a url and a version (`StoredModel.key`). Several processes may share a cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from common.trees import remove
from serving.errors import DiskFull, ModelTooLarge, StartError
from serving.store.disk import closing_descriptor, lock, size_bytes, sync, wait_for_lock
from serving.store.download import Stopping, boot
from serving.store.stopping import Stop

logger = logging.getLogger(__name__)

# A fetch reserves space in steps of 1/STEPS of the cache, or STEP_BYTES if its size has no limit.
# Smaller: an archive of many small files takes longer. Larger: fetches exceed the limit by more, up
# to a step each.
STEPS = 1000
STEP_BYTES = 4 << 20
SYNCED = "synced"  # the model's files are on the disk, and outlive a power cut


class CacheDisk:
    """Models on disk, within `max_bytes` (0: no limit). Raises `StartError` for a bad folder."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self.step_bytes = max_bytes // STEPS or STEP_BYTES
        self.models, self.parts = root / "models", root / "parts"
        self.temporary, self._locks = root / "temporary", root / "locks"
        self._records = root / "fetched"
        self.published: set[str] = set()  # keys that this process has fetched
        try:
            for folder in (self.models, self._records, self.parts, self.temporary, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
        except OSError as error:
            raise StartError(f"the model cache {root} cannot be used: {error}") from None

    def pin(self, key: str, stop: Stop) -> int:
        """Prevents a model's eviction until the returned descriptor is closed.

        Raises `Unavailable` if another process holds the lock for too long.
        """
        return wait_for_lock(self._pin_file(key), stop, shared=True)

    def publish(self, key: str) -> Path:
        """Move a complete model from `temporary` to `models`.

        The load does not wait until its files are on the disk. Should the machine crash before, the
        next start removes the model.
        """
        record = self._records / key
        remove(record)
        record.write_text(boot(), "ascii")
        os.rename(self.temporary / key, self.models / key)
        self.published.add(key)
        with contextlib.suppress(RuntimeError):  # no thread can start
            threading.Thread(target=self._sync, args=(key,), name="sync", daemon=True).start()
        return self.models / key

    def _sync(self, key: str) -> None:
        try:
            with open(self._records / key, "r+", encoding="ascii") as record:
                sync(self.models / key)
                record.write(SYNCED)
                record.truncate()
        except OSError as error:  # such as an eviction
            logger.info("%s in the cache may not outlive a power cut: %s", key, error)

    def _may_be_incomplete(self, key: str) -> bool:
        try:
            return (self._records / key).read_text("ascii") not in (SYNCED, boot())
        except (OSError, ValueError):
            return True

    def free(
        self,
        key: str,
        wanted: int,
        growth: int,
        reserve: Callable[[], object],
        stop: Stop,
        least: int = 0,
    ) -> None:
        """Evict the least recently used models not in use until `wanted` bytes for `key` fit.

        growth: the part of `wanted` that is not on the disk yet
        reserve: called before another thread or process can evict
        least: bytes to free even if all fits
        Raises `DiskFull` without evicting any model, `ModelTooLarge`, or `Unavailable` if another
        process holds the cache's lock for too long.
        """
        most = self._max_bytes
        if most and wanted > most:
            raise ModelTooLarge(
                f"the model needs {megabytes(wanted)} on disk, more than the whole cache:"
                f" {megabytes(most)} (CACHE_MAX_MIB)"
            )
        with closing_descriptor(wait_for_lock(self._root / "lock", stop)):
            others = {k: size for k, size in self.sizes().items() if k != key}
            over = sum(others.values()) + wanted - most if most else 0
            missing = max(over, growth - shutil.disk_usage(self._root).free, least)
            if missing > 0:
                self._evict(others, missing, wanted)
            reserve()

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
                    f"the model needs {megabytes(wanted)} on disk;"
                    f" {megabytes(missing - freed)} of it are in use by models that are loaded or"
                    " being fetched",
                    missing_bytes=missing - freed,
                )
            for key, _ in victims:
                logger.info("removing %s from the cache: %s", key, megabytes(sizes[key]))
                self._remove(key)
        finally:
            for _, pin in victims:
                os.close(pin)

    def remove_if_unused(self, key: str) -> None:
        pin = self._pin_alone(key)
        if pin is not None:
            self._remove(key)
            os.close(pin)

    def _remove(self, key: str) -> None:
        """Remove a model, whose pin must be held exclusively.

        It is renamed first, so that a kill leaves no incomplete model in `models`.
        """
        self.published.discard(key)
        remove(self.temporary / key)
        remove(self._records / key)
        try:
            os.rename(self.models / key, self.temporary / key)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("%s in the cache cannot be removed: %s", key, error)
            return
        self._remove_all(key, self.temporary / key, self.parts / key)

    def _remove_leftovers(self) -> None:
        """Remove files of killed processes, except for downloads, which can be resumed.

        Also removes models of which files were not on the disk when the machine crashed. Does
        nothing while another process evicts: the start does not wait for it.
        """
        descriptor = lock(self._root / "lock")
        if descriptor is None:
            logger.warning("another process holds the lock %s", self._root / "lock")
            return
        with closing_descriptor(descriptor):
            for key in {path.name for path in self.temporary.iterdir()} | self._locked_keys():
                pin = self._pin_alone(key)
                if pin is not None:
                    self._remove_all(key, self.temporary / key)
                    os.close(pin)
            for key in [path.name for path in self.models.iterdir()]:
                if self._may_be_incomplete(key):
                    self.remove_if_unused(key)

    def _pin_alone(self, key: str) -> int | None:
        """Lock a model's pin exclusively; None if it is in use, or its file is another user's."""
        try:
            return lock(self._pin_file(key))
        except OSError as error:
            logger.warning("%s in the cache is not touched: %s", key, error)
            return None

    def _remove_all(self, key: str, *folders: Path) -> None:
        for path in (*folders, self.fetch_lock(key), self._pin_file(key)):
            remove(path)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each model in the cache, on disk or reserved, by key."""
        names = {path.name for folder in (self.models, self.parts) for path in folder.iterdir()}
        return {key: self._size(key) for key in names | self._locked_keys()}

    def _size(self, key: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self.fetch_lock(key).read_text("ascii"))
        return size_bytes(self.models / key) + size_bytes(self.parts / key)

    def _last_used(self, key: str) -> int:
        for path in (self.models / key, self.parts / key):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime_ns
        return 0

    def _locked_keys(self) -> set[str]:
        return {path.stem for path in self._locks.iterdir()}

    def _pin_file(self, key: str) -> Path:
        return self._locks / f"{key}.pin"

    def fetch_lock(self, key: str) -> Path:
        return self._locks / f"{key}.fetch"


class Reservation:
    """The reserved disk space of one fetch, in its lock file, which all processes can read."""

    def __init__(self, disk: CacheDisk, key: str, stopping: Stop) -> None:
        self._disk, self._key = disk, key
        self.descriptor = -1  # of the lock file
        self.stopping = stopping
        self._wanted = self._granted = 0
        self._resumed: Path | None = None

    def grow(self, size: int, resumed: Path | None = None) -> None:
        """Reserves `size` more bytes; `resumed` is a folder that has some of them already.

        Raises `DiskFull`, `ModelTooLarge`, `Stopping`.
        """
        if self.stopping.is_set():
            raise Stopping("the fetch was stopped")
        self._wanted += size
        self._resumed = resumed or self._resumed
        if self._wanted - self._granted > self._disk.step_bytes:
            self._disk.free(
                self._key, self._wanted, self._growth(self._granted), self._write, self.stopping
            )

    def retry(self) -> None:
        """Reset the reservation and free space, after the disk was full in spite of it.

        Evicts at least one model, or raises `DiskFull`.
        """
        growth = self._growth(0)
        self._disk.free(self._key, self._wanted, growth, lambda: None, self.stopping, least=1)
        self._wanted = self._granted = 0

    def _growth(self, granted: int) -> int:
        on_disk = size_bytes(self._resumed, allocated=True) if self._resumed else 0
        return max(self._wanted - granted - on_disk, 0)

    def _write(self) -> None:
        self._granted = self._wanted
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, b"%d" % self._granted, 0)


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
