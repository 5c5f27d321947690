"""A sequence: one answer of a request, its ids and its state."""

from __future__ import annotations

import enum
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from common.errors import EngineError
from engine.backends.interface import Adapter, BackendModel, Logits, Piece, Row

logger = logging.getLogger(__name__)


class State(enum.Enum):
    WAITING = enum.auto()  # in the queue of its model
    PREFILL = enum.auto()  # has a row, which lacks part of the prompt
    DECODE = enum.auto()  # its prompt is computed; each pass gives a token
    FINISHED = enum.auto()


class Result(Protocol):
    """What a sequence sends; the last has a finish reason."""

    @property
    def finish_reason(self) -> str | None: ...


Seq = TypeVar("Seq", bound="Sequence")


@dataclass
class Scheduled:
    """A sequence's part of the next pass: its next token, or tokens of its prompt."""

    sequence: Sequence
    piece: Piece
    completes: bool  # whether logits after the sequence's last token are computed
    num_guesses: int = 0  # at the end of the piece

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens that count as prefill: 0 for a decode step of one token."""
        count = len(self.piece.ids) - self.num_guesses
        return count if count > 1 or not self.completes else 0


@dataclass(eq=False, kw_only=True)
class Sequence(ABC):
    """One answer of a request, of any kind: a row whose tokens passes compute.

    A subclass decides which tokens the next pass computes, `next_parts`, and what follows from
    their logits, `take`.

    `emit` is called with each result, or once with an error, and never after the end.
    """

    prompt: list[int]
    max_length: int
    emit: Callable[[Any], None]
    index: int = 0
    deadline: float | None = None  # on time.monotonic()
    model: Any = None  # an `engine.model.Model`, whose answer it is
    adapter: Adapter | None = None
    state: State = State.WAITING
    cancelled: bool = False
    ids: list[int] = field(init=False)
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused
    failed: EngineError | None = None
    begun: bool = False  # whether a pass has computed some of its tokens
    queued_at: float = field(default_factory=time.monotonic)
    received_at: float = field(default_factory=time.monotonic)  # before its prompt was tokenized

    caches_prefix: ClassVar[bool] = True  # whether later sequences reuse its keys and values
    is_bulk: ClassVar[bool] = False  # whether it may be one of thousands, which take few tokens

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self._ended = False
        self._emit_lock = threading.Lock()

    # What a subclass decides

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """The most tokens that the sequence can have, prompt included."""

    @abstractmethod
    def next_parts(self, row: Row, most: int, model: BackendModel, alone: bool) -> list[Scheduled]:
        """Return the pieces of the next pass, of `most` tokens of its ids behind those in `row`.

        A piece on another row than `row` opens it; the row is closed after the pass.

        alone: whether no other sequence has a row
        """

    @abstractmethod
    def take(self, part: Scheduled, logits: Logits, model: BackendModel) -> bool:
        """Take the logits (N, V) of a part; return whether `Texts.write` is to send tokens now."""

    def begin_like(self: Seq, first: Seq, logits: Logits) -> bool:
        """Take the logits (V,) of the same prompt, computed for `first`; return as `take`."""
        raise NotImplementedError

    @property
    def has_siblings(self) -> bool:
        """Whether other answers may share its prompt's logits, by `begin_like`."""
        return False

    @property
    def uses_prefix(self) -> bool:
        """Whether its row may begin with keys and values that are computed already."""
        return self.caches_prefix

    def row_lengths(self, model: BackendModel) -> list[int]:
        """Return the most tokens of each row that the sequence can have at the same time."""
        return [self.max_tokens]

    @property
    def blocked(self) -> bool:
        """Whether no pass can go on from it yet: see `settle`."""
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait until it is no longer blocked, at most `timeout_s`."""
        raise NotImplementedError

    def settle(self, timeout_s: float = 0.0) -> bool:
        """End the block if possible, within `timeout_s`; return as `take`."""
        return False

    # What all share

    @property
    def num_new(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def over(self) -> bool:
        """Whether the answer has ended or is cancelled, so that nothing more is sent."""
        return self.cancelled or self._ended

    def part(self, row: Row, end: int, num_logits: int) -> Scheduled:
        """Make a part of the ids behind those in `row`, up to `end`."""
        piece = Piece(row, self.ids[row.length : end], num_logits, self.adapter)
        return Scheduled(self, piece, end == len(self.ids))

    def send(self, item: Result | EngineError) -> None:
        """Call `emit` unless the answer has ended; if `emit` raises, end the answer."""
        with self._emit_lock:
            if self.over:
                return
            self._ended = isinstance(item, EngineError) or item.finish_reason is not None
            try:
                self.emit(item)
            except Exception:
                logger.exception("a token could not be sent to its client")
                self._ended = True
                if not isinstance(item, EngineError):
                    with suppress(Exception):
                        self.emit(EngineError("the answer could not be given"))

    def fail(self, error: EngineError) -> None:
        """End the answer with an error; not to be called while a pass computes the sequence."""
        self.failed = error
        self.finish()
        self.send(error)

    def finish(self) -> None:
        """Set the state of an answer to which nothing is added."""
        self.state = State.FINISHED
