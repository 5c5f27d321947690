"""Answers that are generated token by token: freely, or as a form allows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.parameters import Parameters
from engine.backends.interface import BackendModel, Logits, Row
from engine.guesses import Guesser
from engine.rules import Rule
from engine.sampling import Sampler, TokenLogprobs, logprobs_of
from engine.sequence import Scheduled, Sequence, State
from engine.text.constraint import WAIT_S, Constraint

# Most prompt tokens of a sequence in a pass if each of them needs logits, which take 200 KB a token
# with a vocabulary of 50,000. Larger: more memory.
MAX_SCORED_TOKENS = 64
# Tokens that are sent at once for an answer that is not streamed. Larger: fewer wakes of the text
# thread, and tokens are counted later.
TOKENS_AT_ONCE = 8
WRONG = -1  # a guess that no token is


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


@dataclass(eq=False, kw_only=True)
class TextSequence(Sequence):
    """An answer of tokens. The step loop chooses them, a text thread sends them.

    With `eager` each token is sent as soon as it is chosen.
    """

    parameters: Parameters
    stop_ids: frozenset[int]
    eager: bool = True
    characters: int = 0  # of its text so far
    rules: list[Rule] = field(default_factory=list)  # of the parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sampler = Sampler(self.parameters, self.index, self.rules)
        self._tokens: deque[Token] = deque()  # tokens that are not sent yet

    @property
    def max_tokens(self) -> int:
        return min(len(self.prompt) + self.parameters.max_new_tokens, self.max_length)

    def _append(
        self, token: int, logprobs: TokenLogprobs | None, reason: str | None = None
    ) -> Token:
        """Append a token, with the `reason` why it is the last, or for one that the token has."""
        self.ids.append(token)
        self._sampler.accept(token)
        if self._ends(token):
            reason = "stop"
        if reason is None and (
            self.num_new >= self.parameters.max_new_tokens or len(self.ids) >= self.max_length
        ):
            reason = "length"
        if reason is not None:
            self.finish()
        made = Token(self.index, token, "", logprobs, reason)
        self._tokens.append(made)
        return made

    def _ends(self, token: int) -> bool:
        return token in self.stop_ids and not self.parameters.ignore_eos

    def _is_due(self, made: Token) -> bool:
        """Return whether the unsent tokens, the last of which is `made`, are to be sent now."""
        # Stop strings are searched for at once, since tokens behind one are computed in vain.
        eager = self.eager or self.num_new == 1 or bool(self.parameters.stop)
        return eager or made.finish_reason is not None or len(self._tokens) >= TOKENS_AT_ONCE

    def take_tokens(self) -> list[Token]:
        """Remove and return the tokens that are not sent yet; their texts are still empty."""
        return [self._tokens.popleft() for _ in range(len(self._tokens))]


@dataclass(eq=False, kw_only=True)
class Generation(TextSequence):
    """An answer whose tokens are chosen one after another; a pass may check guesses of them."""

    guesser: Guesser | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prefill: list[TokenLogprobs | None] = [None]  # the prompt's first token has none
        self._guesses: list[int] = []  # of the tokens after `_known`, this pass
        self._known = 0  # ids before the guesses
        self._accepted = 0  # guesses that were accepted so far

    @property
    def has_siblings(self) -> bool:
        return self.parameters.num_return_sequences > 1

    @property
    def uses_prefix(self) -> bool:
        return not self._scores_prompt

    @property
    def _is_scored(self) -> bool:
        """Whether the request wants log-probabilities of the prompt."""
        p = self.parameters
        return p.decoder_input_details and p.logprobs is not None

    @property
    def _scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self._is_scored and not self.num_new

    def next_parts(self, row: Row, most: int, model: BackendModel, alone: bool) -> list[Scheduled]:
        scores = self._scores_prompt
        most = min(most, MAX_SCORED_TOKENS) if scores else most
        end = min(row.length + most, len(self.ids))
        completes = end == len(self.ids)
        part = self.part(row, end, end - row.length if scores else int(completes))
        self._guesses = self._guess(model) if alone and completes else []
        self._known, self._accepted = len(self.ids), 0
        if self._guesses:
            part.num_guesses = len(self._guesses)
            part.piece.ids = [*part.piece.ids, *self._guesses]
            part.piece.num_logits += part.num_guesses
        return [part]

    def _guess(self, model: BackendModel) -> list[int]:
        """Return guesses of the next tokens, at most as many as the row can hold.

        Only a sequence that runs alone gets any: with two rows, three guesses each save time only
        if a third of them is right, with eight rows almost never.
        """
        most = self.max_tokens - len(self.ids) - 1
        if self.guesser is None or not self.num_new or most <= 0:
            return []
        return self.guesser.guess(self.ids, most) if model.checks_guesses else []

    def take(self, part: Scheduled, logits: Logits, model: BackendModel) -> bool:
        if self._scores_prompt:
            for row in logits:
                self._score(row)
        if not part.completes:
            return False
        return self._check(part, logits, model) if self._guesses else self.advance(logits[-1])

    def _score(self, logits: Logits) -> None:
        """Store the log-probability of the prompt's next token, from the logits (V,) before it."""
        at = len(self._prefill)
        if at < len(self.prompt):
            assert self.parameters.logprobs is not None
            self._prefill.append(logprobs_of(logits, self.prompt[at], self.parameters.logprobs))

    def begin_like(self, first: Generation, logits: Logits) -> bool:
        self._prefill = first._prefill
        return self.advance(logits)

    def advance(self, logits: Logits) -> bool:
        """Choose the next token by its logits (V,) and append it; return as `take`."""
        return self._add(*self._sampler.choose(logits, self.ids))

    def _add(self, token: int, logprobs: TokenLogprobs | None, reason: str | None = None) -> bool:
        made = self._append(token, logprobs, reason)
        if self._guesses:
            self._check_guess(made)
        if self.parameters.decoder_input_details and self.num_new == 1:
            none: list[TokenLogprobs | None] = [None] * len(self.prompt)
            made.prefill = list(
                zip(self.prompt, self._prefill if self._is_scored else none, strict=True)
            )
        if made.finish_reason is not None and self.guesser is not None:
            self.guesser.remember(self.ids[len(self.prompt) :])
        return self._is_due(made)

    def _check(self, part: Scheduled, logits: Logits, model: BackendModel) -> bool:
        """Choose the next tokens by their logits (1 + guesses, V); return as `take`.

        The first row gives one token; each further row gives one if the guess before it was chosen.
        """
        due, chosen, count = False, 0, part.num_guesses
        while self._accepted == chosen <= count and self.state is not State.FINISHED:
            due = self.advance(logits[chosen]) or due
            if chosen < count:  # it runs alone, so nothing else waits
                due = self.settle(WAIT_S) or due
            if self.blocked:  # its token comes later, as one that no guess was right for
                self._guesses[self._accepted :] = [WRONG] * (count - self._accepted)
                break
            chosen = len(self.ids) - self._known
        model.truncate(part.piece.row, self._known + self._accepted)
        assert self.guesser is not None
        self.guesser.check(count, self._accepted)
        self.model.statistics.guessed_tokens += count
        self.model.statistics.accepted_tokens += self._accepted
        return due

    def _check_guess(self, made: Token) -> None:
        """Compare the token that was appended last with the guess for its place."""
        at = len(self.ids) - self._known - 1
        if at != self._accepted or at == len(self._guesses):
            return  # the token is behind a wrong guess, or behind the last guess
        made.accepted = self._guesses[at] == made.id
        self._accepted += made.accepted
        if not made.accepted or made.finish_reason is not None:
            made.rejected = len(self._guesses) - self._accepted


@dataclass(eq=False, kw_only=True)
class FormGeneration(Generation):
    """An answer that must match a form. It is blocked while the next mask is computed."""

    constraint: Constraint

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chosen: tuple[int, TokenLogprobs | None] | None = None  # see `blocked`

    def advance(self, logits: Logits) -> bool:
        self._choose(*self._sampler.choose(logits, self.ids, self.constraint))
        return self.settle()

    def _choose(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._chosen = token, logprobs
        if not self._ends(token):
            self.constraint.advance(token)

    @property
    def blocked(self) -> bool:
        """Whether a token is chosen whose next mask is not there yet."""
        return self._chosen is not None

    def wait(self, timeout_s: float) -> None:
        self.constraint.wait(timeout_s)

    def settle(self, timeout_s: float = 0.0) -> bool:
        """Append the chosen token, and tokens that the form forces; return whether to send now.

        Waits `timeout_s` for the form's mask, but not for that of a slow form, and appends nothing
        without it. Raises the error of a form that cannot go on.
        """
        due, constraint = False, self.constraint
        while self._chosen is not None:
            hopeful = constraint.ready or not constraint.slow
            if not hopeful or not constraint.wait(timeout_s):
                break
            constraint.check()
            chosen, self._chosen = self._chosen, None
            due = self._add(*chosen, "complete" if constraint.complete else None) or due
            # With log-probabilities each token needs a pass.
            if self.parameters.logprobs is not None:
                break
            if self.state is not State.FINISHED and constraint.forced is not None:
                self._choose(constraint.forced, None)
        return due

    def finish(self) -> None:
        super().finish()
        self._chosen = None
        self.constraint.close()
