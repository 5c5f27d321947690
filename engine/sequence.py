"""A sequence: one answer of a request, its ids and its state."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from common.errors import EngineError
from common.parameters import Parameters
from engine.backends.interface import Adapter
from engine.guesses import Guesser
from engine.labels import Labels
from engine.rules import Rule
from engine.sampling import Logits, Sampler, TokenLogprobs, logprobs_of
from engine.text.constraint import Constraint

logger = logging.getLogger(__name__)


class State(enum.Enum):
    WAITING = enum.auto()  # in the queue of its model
    PREFILL = enum.auto()  # has a row, which lacks part of the prompt
    DECODE = enum.auto()  # its prompt is computed; each pass gives a token
    FINISHED = enum.auto()


@dataclass
class Token:
    """A token of an answer with its text, which may be empty; the last has a finish reason."""

    index: int
    id: int
    text: str
    logprobs: TokenLogprobs | None = None
    # "stop", "length", or "complete" for the last token of a form, which clients see as "stop"
    finish_reason: str | None = None
    accepted: bool = False  # whether it was guessed
    rejected: int = 0  # wrong guesses of this token and of those behind it
    # The prompt's tokens, on the first token of an answer with `decoder_input_details`.
    prefill: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)  # the bytes of each id in `shown`
    special_ids: frozenset[int] = frozenset()  # the model's tokens that are not text
    # With the last token, if `choice_logprobs` is set: a choice's texts, their log-probabilities.
    choices: list[tuple[str, float]] = field(default_factory=list)

    @property
    def shown(self) -> list[int]:
        """The ids whose texts are sent one by one, in the order of `pieces`.

        They are the prompt's ids, then this token's if it has log-probabilities, each followed by
        the likeliest ids at its position.
        """
        sent = [*self.prefill, *([(self.id, self.logprobs)] if self.logprobs else [])]
        return [
            i
            for token, logprobs in sent
            for i in (token, *(t for t, _ in (logprobs.top if logprobs else ())))
        ]


# Tokens that are sent at once for an answer that is not streamed. Larger: fewer wakes of the text
# thread, and tokens are counted later.
TOKENS_AT_ONCE = 8


@dataclass(eq=False)
class Sequence:
    """One answer of a request. The step loop chooses its tokens, a text thread sends them.

    `emit` is called with each `Token`, or once with an error, and never after the end. With `eager`
    each token is sent as soon as it is chosen.
    """

    prompt: list[int]
    parameters: Parameters
    max_length: int
    stop_ids: frozenset[int]
    emit: Callable[[Token | EngineError], None]
    index: int = 0
    eager: bool = True
    deadline: float | None = None  # on time.monotonic()
    model: Any = None  # an `engine.model.Model`, whose answer it is
    adapter: Adapter | None = None
    constraint: Constraint | None = None  # from the request's form
    labels: Labels | None = None  # if `choice_logprobs` is set
    rules: list[Rule] = field(default_factory=list)  # of the parameters
    guesser: Guesser | None = None
    guesses: list[int] = field(default_factory=list)  # of the tokens after `known`, this pass
    known: int = 0  # ids before the guesses
    accepted: int = 0  # guesses that were accepted so far
    state: State = State.WAITING
    cancelled: bool = False
    ids: list[int] = field(init=False)
    characters: int = 0  # of its text so far
    cached_tokens: int = 0  # prompt tokens whose keys and values were reused
    failed: EngineError | None = None
    begun: bool = False  # whether a pass has computed some of its tokens
    queued_at: float = field(default_factory=time.monotonic)
    received_at: float = field(default_factory=time.monotonic)  # before its prompt was tokenized

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self._sampler = Sampler(self.parameters, self.index, self.rules)
        self._tokens: deque[Token] = deque()  # tokens that are not sent yet
        self._ended = False
        self._chosen: tuple[int, TokenLogprobs | None] | None = None  # see `awaits_form`
        self._prefill: list[TokenLogprobs | None] = [None]  # the prompt's first token has none
        self._emit_lock = threading.Lock()

    @property
    def num_new(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def max_tokens(self) -> int:
        """The most tokens that the sequence can have, prompt included."""
        new = self.parameters.max_new_tokens if self.labels is None else self.labels.longest
        return min(len(self.prompt) + new, self.max_length)

    @property
    def is_scored(self) -> bool:
        """Whether the request wants log-probabilities of the prompt."""
        p = self.parameters
        return p.decoder_input_details and p.logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.is_scored and not self.num_new

    def score(self, logits: Logits) -> None:
        """Store the log-probability of the prompt's next token, from the logits (V,) before it."""
        at = len(self._prefill)
        if at < len(self.prompt):
            assert self.parameters.logprobs is not None
            self._prefill.append(logprobs_of(logits, self.prompt[at], self.parameters.logprobs))

    def score_label(self, logits: Logits) -> bool:
        """Score a path of the labels by its logits (1 + T, V); returns whether it was the last."""
        assert self.labels is not None
        self.labels.score(logits, self.parameters.logprobs or 0)
        if not self.labels.complete:
            return False
        text = self._sampler.pick(self.labels.scores)
        for token, logprobs in self.labels.tokens(text):
            if self.state is not State.FINISHED:
                self._append(token, None if self.parameters.logprobs is None else logprobs)
        self.state = State.FINISHED
        self._tokens[-1].finish_reason = self._tokens[-1].finish_reason or "complete"
        self._tokens[-1].choices = self.labels.logprobs
        return True

    def begin_like(self, other: Sequence) -> None:
        """Share the prompt's log-probabilities with another answer of the same request."""
        self._prefill = other._prefill

    @property
    def over(self) -> bool:
        """Whether the answer has ended or is cancelled, so that no more tokens are sent."""
        return self.cancelled or self._ended

    def set_guesses(self, guesses: list[int]) -> None:
        """Set the guesses that the next pass checks."""
        self.guesses, self.known, self.accepted = guesses, len(self.ids), 0

    def advance(self, logits: Logits) -> bool:
        """Choose the next token and append it, unless it `awaits_form`; return as `settle`."""
        self._choose(*self._sampler.choose(logits, self.ids, self.constraint))
        return self.settle()

    def _choose(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._chosen = token, logprobs
        if self.constraint is not None and not self._ends(token):
            self.constraint.advance(token)

    @property
    def awaits_form(self) -> bool:
        """Whether a token is chosen whose next mask is not there yet: no pass can go on from it."""
        return self._chosen is not None

    def settle(self, timeout_s: float = 0.0) -> bool:
        """Append the chosen token, and tokens that the form forces; return whether to send now.

        Waits `timeout_s` for the form's mask, but not for that of a slow form, and appends nothing
        without it. Raises the error of a form that cannot go on.
        """
        due, constraint = False, self.constraint
        while self._chosen is not None:
            if constraint is not None:
                hopeful = constraint.ready or not constraint.slow
                if not hopeful or not constraint.wait(timeout_s):
                    break
                constraint.check()
            chosen, self._chosen = self._chosen, None
            due = self._append(*chosen) or due
            # With log-probabilities each token needs a pass.
            if constraint is None or self.parameters.logprobs is not None:
                break
            if self.state is not State.FINISHED and constraint.forced is not None:
                self._choose(constraint.forced, None)
        return due

    def _append(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        self.ids.append(token)
        self._sampler.accept(token)
        reason = None
        if self._ends(token):
            reason = "stop"
        elif self.constraint is not None and self.constraint.complete:
            reason = "complete"
        if reason is None and (
            self.num_new >= self.parameters.max_new_tokens or len(self.ids) >= self.max_length
        ):
            reason = "length"
        if reason is not None:
            self.finish()
        made = Token(self.index, token, "", logprobs, reason)
        if self.guesses:
            self._check_guess(made)
        if self.parameters.decoder_input_details and self.num_new == 1:
            none: list[TokenLogprobs | None] = [None] * len(self.prompt)
            made.prefill = list(
                zip(self.prompt, self._prefill if self.is_scored else none, strict=True)
            )
        self._tokens.append(made)
        # Stop strings are searched for at once, since tokens behind one are computed in vain.
        eager = self.eager or self.num_new == 1 or bool(self.parameters.stop)
        return eager or reason is not None or len(self._tokens) >= TOKENS_AT_ONCE

    def _ends(self, token: int) -> bool:
        return token in self.stop_ids and not self.parameters.ignore_eos

    def _check_guess(self, made: Token) -> None:
        """Compare the token that was appended last with the guess for its place."""
        at = len(self.ids) - self.known - 1
        if at != self.accepted or at == len(self.guesses):
            return  # the token is behind a wrong guess, or behind the last guess
        made.accepted = self.guesses[at] == made.id
        self.accepted += made.accepted
        if not made.accepted or made.finish_reason is not None:
            made.rejected = len(self.guesses) - self.accepted

    def take_tokens(self) -> list[Token]:
        """Remove and return the tokens that are not sent yet; their texts are still empty."""
        return [self._tokens.popleft() for _ in range(len(self._tokens))]

    def send(self, item: Token | EngineError) -> None:
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
                if isinstance(item, Token):
                    with suppress(Exception):
                        self.emit(EngineError("the answer could not be given"))

    def fail(self, error: EngineError) -> None:
        """End the answer with an error; not to be called while a pass computes the sequence."""
        self.failed = error
        self.finish()
        self.send(error)

    def finish(self) -> None:
        """Set the state of an answer to which no token is added."""
        self.state, self._chosen = State.FINISHED, None
        if self.constraint is not None:
            self.constraint.close()
