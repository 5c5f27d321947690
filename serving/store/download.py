"""Downloads a model's files in parallel ranges, and resumes interrupted downloads.

Finished ranges are listed in a file beside the data. Each folder is for one version of a model, and
each range is requested for that version, so ranges of two versions never mix.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.trees import remove
from serving.errors import ArchiveError, StoreUnavailable
from serving.store.catalog import Remote, StoredFile, public_url
from serving.store.disk import raise_disk_full
from serving.store.stopping import Stop

RANGE_BYTES = 8 << 20  # larger: an interrupted range loses more; smaller: more requests
CONNECTIONS = 8
ATTEMPTS = 3  # attempts in a row that receive nothing, before a range fails
PAUSE_S = 0.3  # before the 2nd attempt; twice as long before the 3rd
# A download that receives fewer than PACE_BYTES in PACE_S fails; the next one resumes it. At this
# pace KoGPT2 takes more than an hour.
PACE_BYTES, PACE_S = 512 << 10, 20.0
PACE_POLL_S = 0.5  # between checks of the pace
READER_BYTES = 256 << 10  # buffer for reading an archive
JOIN_S = 1.0  # time limit to join threads of a failed download, which may still be connecting


class Stopping(StoreUnavailable):
    """The server stops, or the load was cancelled; the next download resumes this one."""


class Range(NamedTuple):
    file: int
    start: int
    stop: int


class Download:
    """A download of a model's files into `folder`, as a context manager that joins its threads.

    `files/` below it has the data, at full length from the start; an archive is `files/archive`.
    """

    def __init__(
        self, remote: Remote, files: Sequence[StoredFile], folder: Path, stopping: Stop
    ) -> None:
        self._remote, self._files, self._stopping = remote, files, stopping
        self.folder = folder / "files"
        # A list from before a reboot is ignored: in a crash of the machine, data of listed ranges
        # may not have reached the disk.
        self._notes = folder / f"finished-{boot()}"
        with raise_disk_full("a model"):
            if folder.exists() and not self._notes.exists():
                remove(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                self._make(file)
            self._notes.touch()
        wanted = [r for number, file in enumerate(files) for r in self._ranges(number, file)]
        self._finished = set(wanted) & self._noted()
        self._pending = deque(r for r in wanted if r not in self._finished)
        self._count = len(wanted)
        self._error: BaseException | None = None
        self._failed = Stop()
        self._received = 0  # bytes
        self._paced = time.monotonic(), 0  # time and received bytes of the last check of the pace
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.missing_bytes = sum(r.stop - r.start for r in self._pending)
        self.seconds = 0.0

    def __enter__(self) -> Download:
        self._started = time.monotonic()
        for _ in range(min(CONNECTIONS, len(self._pending))):
            # Daemon threads: a process may end without them, because downloads can be resumed.
            thread = threading.Thread(target=self._work, name="download", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        for thread in self._threads:
            # A late thread does no harm: it writes the same bytes as the next download.
            thread.join(None if error is None else JOIN_S)

    def wait(self) -> None:
        """Wait for the end of the download. Raises the error of a failed one."""
        self._wait_until(lambda: len(self._finished) == self._count)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while self._error is None and not done():
                self._changed.wait(PACE_POLL_S)
                self._check_pace()
            if self._error is not None:
                raise self._error

    def _check_pace(self) -> None:
        since, before = self._paced
        received, now = self._received - before, time.monotonic()
        if not self._remote.paced or received >= PACE_BYTES:
            self._paced = now, self._received
        elif now - since >= PACE_S:
            self._fail(
                StoreUnavailable(
                    f"{public_url(self._files[0].address)} sends too slowly: {received} bytes in"
                    f" {now - since:.0f} s, must be at least {PACE_BYTES}"
                )
            )

    @contextlib.contextmanager
    def reader(self) -> Iterator[io.BufferedReader]:
        """Open the archive for reading during the download; reads wait for missing bytes."""
        with self._path(self._files[0]).open("rb", buffering=0) as data:
            yield io.BufferedReader(Reader(self, data), READER_BYTES)

    def wait_for(self, position: int) -> int:
        """Wait for the archive's byte at `position`; return the number of bytes ready from there.

        Returns 0 at the end of the archive. Raises the download's error.
        """
        file = self._files[0]
        if position >= file.size_bytes:
            return 0
        start = position - position % self._range_bytes(file)
        wanted = Range(0, start, min(start + self._range_bytes(file), file.size_bytes))
        self._wait_until(lambda: wanted in self._finished)
        return wanted.stop - position

    def _path(self, file: StoredFile) -> Path:
        return self.folder / (file.path or "archive")

    def _make(self, file: StoredFile) -> None:
        path = self._path(file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as data:
                data.truncate(file.size_bytes)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise ArchiveError(f"{file.path} is both a file and a folder") from None

    def _range_bytes(self, file: StoredFile) -> int:
        return RANGE_BYTES if self._remote.ranged else max(file.size_bytes, 1)

    def _ranges(self, number: int, file: StoredFile) -> list[Range]:
        step, size = self._range_bytes(file), file.size_bytes
        return [Range(number, at, min(at + step, size)) for at in range(0, size, step)]

    def _noted(self) -> set[Range]:
        # A killed process may leave a partial line, to which the next one appends.
        lines = re.findall(
            r"^range (\d+) (\d+) (\d+)\n", self._notes.read_text("ascii"), re.MULTILINE
        )
        return {Range(*map(int, numbers)) for numbers in lines}

    def _work(self) -> None:
        try:
            with (
                self._stopping.covers(),
                self._failed.covers(),
                self._notes.open("ab", buffering=0) as notes,
            ):
                while True:
                    with self._changed:
                        if self._error is not None or not self._pending:
                            return
                        wanted = self._pending.popleft()
                    with raise_disk_full("a model"):
                        self._fetch(wanted)
                        notes.write(b"range %d %d %d\n" % wanted)
                    with self._changed:
                        self._finished.add(wanted)
                        self.seconds = time.monotonic() - self._started
                        self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._failed.set()

    def _fetch(self, wanted: Range) -> None:
        """Download a range; retry from where it broke off, if the store can.

        Raises `StoreUnavailable` after ATTEMPTS attempts in a row that receive nothing.
        """
        file, attempts, position = self._files[wanted.file], 0, wanted.start
        while position < wanted.stop:
            if not self._remote.ranged:
                position = wanted.start
            before = position
            try:
                self._raise_if_stopped()
                for data in self._remote.read(file, position, wanted.stop):
                    self._raise_if_stopped()
                    self._received += len(data)
                    if position + len(data) > wanted.stop:
                        raise StoreUnavailable(
                            f"{public_url(file.address)} sends more than the requested"
                            f" {wanted.stop - wanted.start} bytes"
                        )
                    self._write(file, position, data)
                    position += len(data)
                if position < wanted.stop:
                    raise StoreUnavailable(f"{public_url(file.address)} broke off")
            except Stopping:
                raise
            except StoreUnavailable:
                self._raise_if_stopped()
                attempts = 1 if self._remote.ranged and position > before else attempts + 1
                if attempts == ATTEMPTS:
                    raise
                self._stopping.wait(PAUSE_S * attempts)

    def _write(self, file: StoredFile, position: int, data: bytes) -> None:
        # The file is not held open: it may be removed while a thread of a failed download waits for
        # the store, and an open file would still take space on the disk.
        descriptor = os.open(self._path(file), os.O_WRONLY)
        try:
            while data:  # an almost full disk may write less
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written
        finally:
            os.close(descriptor)

    def _raise_if_stopped(self) -> None:
        if self._failed.is_set() or self._stopping.is_set():
            raise Stopping("the download was stopped")


class Reader(io.RawIOBase):
    """An archive that is being downloaded, as a raw file; `read` waits for missing bytes."""

    def __init__(self, download: Download, data: io.FileIO) -> None:
        super().__init__()
        self._download, self._data = download, data

    def readinto(self, buffer: Any) -> int:
        ready = self._download.wait_for(self._data.tell())
        return self._data.readinto(memoryview(buffer)[:ready])

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._data.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def boot() -> str:
    """Return an id that changes with each boot of the machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return "unknown"
