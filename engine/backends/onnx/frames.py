"""onnxruntime sessions whose weights are exchanged: opened once, then shown one model or another.

To open a session takes onnxruntime tens of milliseconds, and in fp32 hundreds: it packs all weights
once more to find those on the disk. But all that distinguishes two models of one shape is the
content of files that the session has mapped. So a frame is a session on blank weights, and its
windows are the addresses of these: a model's files are mapped over them, which takes a few
milliseconds, and over those another's. A frame that is given back is kept for the next model of its
shape.

Where onnxruntime packs weights into memory of its own (fp32, up to 1.23, for Python 3.10), a frame
shows one model from the beginning to its end.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnxruntime import OrtValue

from common import onnx_session
from common.errors import EngineError, OutOfMemory
from common.memory import return_freed_memory
from engine.backends.mapping import RESERVED, map_over
from engine.backends.onnx import packing
from engine.backends.page_cache import Span, present

PROT_NONE = 0
Piece = tuple[Path, int, int]  # file, offset, length

SPARE = 4  # frames of one shape that are kept for the next models


@dataclass(frozen=True)
class FrameFiles:
    """What a frame is opened from (`engine.prepared.build.build_frame`).

    windows: where weights are that onnxruntime has packed; matrices: name and length of those that
    we have; plain: name, type, shape and offset of the others, which are `plain_bytes` of memory;
    hides: whether onnxruntime packs what nobody else can see
    """

    key: str
    graph: Path
    windows: list[Piece]
    matrices: list[tuple[str, int]]
    plain: list[tuple[str, str, list[int], int]]
    plain_bytes: int
    hides: bool

    @property
    def lengths(self) -> list[int]:
        """Of the pieces that are shown."""
        given = [self.plain_bytes, *(length for _, length in self.matrices)]
        return [*given, *(length for _, _, length in self.windows)]


class Frame:
    """A session and the addresses of its weights. Not thread-safe."""

    def __init__(self, files: FrameFiles, pieces: list[Piece], profile: Path | None = None) -> None:
        """Shows the pieces. `profile`: see `onnx_session.open_packed`. Raises `OutOfMemory`."""
        self.key, self.can_show_another = files.key, not files.hides
        # A very small model has no plain tensors: all that is not packed is in the graph.
        lengths = [max(files.plain_bytes, 1), *(length for _, length in files.matrices)]
        *begins, end = itertools.accumulate(map(_whole_pages, lengths), initial=0)
        self._memory = mmap.mmap(-1, end, flags=RESERVED)
        given = np.frombuffer(self._memory, np.uint8)
        self.windows = [
            (given.ctypes.data + begin, length)
            for begin, length in zip(begins, files.lengths, strict=False)
        ]
        if files.hides:
            self.show(pieces)
        tensors = {
            name: given[offset : offset + math.prod(shape) * np.dtype(dtype).itemsize]
            .view(dtype)
            .reshape(shape)
            for name, dtype, shape, offset in files.plain
        }
        for begin, (name, length) in zip(begins[1:], files.matrices, strict=True):
            tensors[name] = given[begin : begin + length]
        self._given = {name: OrtValue.ortvalue_from_numpy(t) for name, t in tensors.items()}
        with _opening:  # so that the files are mapped by this one only
            library = packing.library() if files.matrices else None
            self.session = onnx_session.open_packed(files.graph, self._given, library, profile)
            if self.can_show_another:
                self.windows += _addresses(files.windows)
                self._check()
        _forget({path for path, _, _ in files.windows})
        return_freed_memory()  # it packed all weights again: 10 MB
        self.show(pieces)

    def _check(self) -> None:
        """Each window is looked through: a step reads all of it, not a copy that nobody sees."""
        self._map_nothing(mmap.PROT_READ)
        onnx_session.run_blank(self.session)
        for address, length in self.windows[1:]:
            read = present(address, length)
            if read.sum() < len(read) / 2:
                raise EngineError("onnxruntime does not use the weights that it was to find packed")
        self.clear()

    def show(self, pieces: list[Piece]) -> None:
        """Maps a piece into each window. Raises `OutOfMemory`, and `OSError` for want of a file."""
        with ExitStack() as stack:
            files: dict[Path, int] = {}
            for (path, offset, _), (address, length) in zip(pieces, self.windows, strict=True):
                if path not in files:
                    files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, files[path])
                _map(address, length, mmap.PROT_READ, mmap.MAP_PRIVATE, files[path], offset)

    def clear(self) -> None:
        """No file is mapped any more."""
        self._map_nothing(PROT_NONE)

    def _map_nothing(self, protection: int) -> None:
        for address, length in self.windows:
            _map(address, length, protection, RESERVED, -1, 0)


_opening = threading.Lock()
_spare: defaultdict[str, list[Frame]] = defaultdict(list)
_ahead: dict[Hashable, threading.Event] = {}


@contextmanager
def opened_ahead(shape: Hashable) -> Iterator[None]:
    """Inside, a frame is made for models of a shape that are yet to come."""
    done = _ahead[shape] = threading.Event()
    try:
        yield
    finally:
        del _ahead[shape]
        done.set()


def wait_for(shape: Hashable) -> None:
    """Until a frame that is opened ahead for this shape can be had: sooner than another could."""
    if (done := _ahead.get(shape)) is not None:
        done.wait()


def take(files: FrameFiles, pieces: list[Piece]) -> Frame:
    """A frame that shows the pieces. Raises `OutOfMemory`, and `OSError` for want of a file."""
    try:
        frame = _spare[files.key].pop()
    except IndexError:
        return Frame(files, pieces)
    frame.show(pieces)
    return frame


def give_back(frame: Frame) -> None:
    if frame.can_show_another:
        frame.clear()
        if len(_spare[frame.key]) < SPARE:
            _spare[frame.key].append(frame)


def _whole_pages(length: int) -> int:
    return length + -length % mmap.PAGESIZE


def _map(address: int, size: int, protection: int, flags: int, file: int, offset: int) -> None:
    if not size:
        return
    try:
        map_over(address, size, protection, flags, file, offset)
    except OSError as error:
        raise OutOfMemory(f"weights cannot be mapped: {error.strerror}") from error


def _addresses(windows: list[Piece]) -> list[Span]:
    """Where each is mapped in this process, with its length."""
    mapped: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, offset, _, _, *path = line.split(None, 5)
            if path:
                begin, end = (int(address, 16) for address in span.split("-"))
                name = path[0].rstrip("\n").removesuffix(" (deleted)").rpartition("/")[2]
                mapped[name].append((int(offset, 16), begin, end - begin))
    addresses = []
    for file, at, length in windows:
        found = [
            start + at - first
            for first, start, size in mapped[file.name]
            if first <= at and at + length <= first + size
        ]
        if len(found) != 1:
            raise EngineError(f"onnxruntime maps weights {len(found)} times, not once: {file.name}")
        addresses.append((found[0], length))
    return addresses


def _forget(files: set[Path]) -> None:
    """Frees the page cache of what is read only to open a frame."""
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
