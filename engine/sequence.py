"""One answer in the making: its ids, its text so far, and where it stands."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.parameters import Parameters
from engine.sampling import Logits, Sampler, TokenLogprobs
from engine.stripper import Stripper
from engine.tokenizers import Detokenizer

logger = logging.getLogger(__name__)


class State(enum.Enum):
    WAITING = enum.auto()  # in the queue of its model
    PREFILL = enum.auto()  # has a row; part of its prompt is in the cache
    DECODE = enum.auto()  # in the running batch
    FINISHED = enum.auto()


@dataclass
class Token:
    """What one step gave one sequence: a piece of text, perhaps empty, and how it ended, if so."""

    index: int
    id: int
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None  # "stop" or "length"


@dataclass
class Sequence:
    """`emit` is called on the engine's thread with each `Token`, or once with an error."""

    prompt: list[int]
    parameters: Parameters
    max_length: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    emit: Callable[[Token | EngineError], None]
    index: int = 0
    strip: tuple[str, ...] = ()
    deadline: float | None = None  # on time.monotonic()
    state: State = State.WAITING
    cancelled: bool = False
    ids: list[int] = field(init=False)
    queued_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self._sampler = Sampler(self.parameters, self.index)
        self._held = ""  # text that may be the beginning of a stop string
        self._stripper = Stripper(self.strip)

    @property
    def num_new(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def max_tokens(self) -> int:
        """The most tokens that its row can come to hold."""
        return min(len(self.prompt) + self.parameters.max_new_tokens, self.max_length)

    def advance(self, logits: Logits) -> None:
        """Chooses the next token from the logits (V,) of this row and emits it."""
        token, logprobs = self._sampler.choose(logits, self.ids)
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.ids.append(token)
        if token in self.stop_ids:
            self._finish(token, self._held + self.detokenizer.flush(), logprobs, "stop")
            return
        text = self._held + self.detokenizer.feed(token)
        at, keep = _find_stop(text, self.parameters.stop)
        if at is not None:
            self._finish(token, text[:at], logprobs, "stop")
        elif self.num_new >= self.parameters.max_new_tokens or len(self.ids) >= self.max_length:
            text += self.detokenizer.flush()
            at, _ = _find_stop(text, self.parameters.stop)
            reason = "length" if at is None else "stop"
            self._finish(token, text[:at], logprobs, reason)
        else:
            self._held = text[len(text) - keep :]
            text = self._stripper.feed(text[: len(text) - keep])
            self.emit(Token(self.index, token, text, logprobs))

    def _finish(self, token: int, text: str, logprobs: TokenLogprobs | None, reason: str) -> None:
        self.state = State.FINISHED
        self.emit(Token(self.index, token, self._stripper.finish(text), logprobs, reason))

    def fail(self, error: EngineError) -> None:
        """Never raises: one that cannot be told (its client's event loop has gone) keeps no other
        from being told."""
        self.state = State.FINISHED
        try:
            self.emit(error)
        except Exception:
            logger.exception("a request could not be told that it failed")


def _find_stop(text: str, stops: tuple[str, ...]) -> tuple[int | None, int]:
    """Where the first stop string begins, and how many last characters may begin one."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    if found:
        return min(found), 0
    longest = max((len(stop) for stop in stops), default=0)
    for keep in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-keep:]) for stop in stops):
            return None, keep
    return None, 0
