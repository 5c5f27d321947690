"""Downloads a model's files in ranges, several at once, and goes on where a killed one stopped.

Finished ranges are noted in a file beside the data. The folder is that of one version of one
model, and every range is asked for as of that version, so ranges of two versions never mix.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from common.trees import remove
from serving.errors import ArchiveError, StoreUnavailable
from serving.store.catalog import Remote, StoredFile, public_url
from serving.store.disk import full_disk_is_an_error_of_ours
from serving.store.stopping import Stop

RANGE_BYTES = 8 << 20
CONNECTIONS = 8
# Tries in a row that bring no byte.
ATTEMPTS = 3
PAUSE_S = 0.3
# A download that brings fewer bytes in so many seconds is given up; the next one resumes it. At
# this pace KoGPT2 takes more than an hour.
PACE_BYTES, PACE_S = 512 << 10, 20.0
LOOK_S, JOIN_S = 0.5, 1.0


class Stopping(StoreUnavailable):
    """The server ends, or nobody wants the model any more; the next download resumes this one."""


class Range(NamedTuple):
    file: int
    start: int
    stop: int


class Download:
    """A download into `folder`: `files/` holds the data, at full length from the start.

    As a context, it ends its threads when left. An archive's one file is `files/archive`.
    """

    def __init__(
        self, remote: Remote, files: Sequence[StoredFile], folder: Path, stopping: Stop
    ) -> None:
        self._remote, self._files, self._stopping = remote, files, stopping
        self.folder = folder / "files"
        # After a crash of the machine, what was noted may not have reached the disk.
        self._notes = folder / f"finished-{_boot()}"
        with full_disk_is_an_error_of_ours("a model"):
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
        self._paced = time.monotonic(), 0  # when so many had been received
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.missing_bytes = sum(r.stop - r.start for r in self._pending)
        self.seconds = 0.0

    def __enter__(self) -> Download:
        self._started = time.monotonic()
        for _ in range(min(CONNECTIONS, len(self._pending))):
            # Daemons: a process that ends need not wait for them, what they did is resumed.
            thread = threading.Thread(target=self._work, name="download", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        for thread in self._threads:
            # One that is just connecting may take longer: what it writes then is what the next
            # download would write there.
            thread.join(None if error is None else JOIN_S)

    def wait(self) -> None:
        """Until all is there. Raises what went wrong."""
        self._wait_until(lambda: len(self._finished) == self._count)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while self._error is None and not done():
                self._changed.wait(LOOK_S)
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
    def reader(self) -> Iterator[Reader]:
        """Reads the archive from its beginning while it is downloaded."""
        with self._path(self._files[0]).open("rb", buffering=0) as data:
            yield Reader(self, data)

    def wait_for(self, position: int) -> int:
        """Until the archive's byte at `position` is there; returns how many follow, it included.

        0 at the end. Raises what went wrong.
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
        # A killed process may leave half a line, and the next one writes on there.
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
                    with full_disk_is_an_error_of_ours("a model"):
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
        """Goes on where a connection broke; gives up after `ATTEMPTS` without a byte in a row."""
        descriptor = os.open(self._path(self._files[wanted.file]), os.O_WRONLY)
        try:
            self._fetch_into(descriptor, self._files[wanted.file], wanted)
        finally:
            os.close(descriptor)

    def _fetch_into(self, descriptor: int, file: StoredFile, wanted: Range) -> None:
        attempts, position = 0, wanted.start
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
                            f"{public_url(file.address)} sends more than was asked for"
                        )
                    end = position + len(data)
                    while position < end:  # an almost full disk takes a part of it
                        position += os.pwrite(descriptor, data[position - end :], position)
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

    def _raise_if_stopped(self) -> None:
        if self._failed.is_set() or self._stopping.is_set():
            raise Stopping("the download was stopped")


class Reader:
    """A file that grows; reading waits for the bytes that are not there yet."""

    def __init__(self, download: Download, data: FileIO) -> None:
        self._download, self._data = download, data

    def read(self, size: int = -1, /) -> bytes:
        """All that is asked for, less at the end only, as zipfile needs it."""
        pieces = []
        while size and (there := self._download.wait_for(self._data.tell())):
            piece = self._data.read(there if size < 0 else min(size, there))
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece) if size > 0 else 0
        return b"".join(pieces)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._data.seek(offset, whence)

    def tell(self) -> int:
        return self._data.tell()

    def seekable(self) -> bool:
        return True


def _boot() -> str:
    """Names this run of the machine's kernel."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return "unknown"
