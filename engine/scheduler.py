"""Continuous batching: the waiting and running sequences of one model."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from common.errors import DeadlineExceeded, EngineError, OutOfMemory
from engine.backends.interface import BackendModel, Piece, Row
from engine.budget import Budget
from engine.labels import Labels
from engine.native.library import PAGE_TOKENS
from engine.prefixes import Prefixes, prefix_of, shared_length, to_ids
from engine.sequence import Sequence, State

MAX_SCORED_TOKENS = 64  # in a pass: each has logits, which take 200 KB with a vocabulary of 50,000
# Labels of one choice that a pass scores beside each other. Each has a row whose first page may be
# a copy, so that sixteen rows take 20 MB with a model of KoGPT2's size.
MAX_LABEL_ROWS = 16
MAX_FORCED_TOKENS = 16  # of one sequence in a pass, which the others wait for


@dataclass
class Scheduled:
    """A sequence's part of the next pass: its next token, or tokens of its prompt."""

    sequence: Sequence
    piece: Piece
    completes: bool  # whether the logits of the sequence's last token come with it

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens beside the one of a decode step."""
        count = len(self.piece.ids) - len(self.sequence.guesses)
        return count if count > 1 or not self.completes else 0


class Batch:
    """The sequences of one model, or of a base and its adapters: those with a row, and a queue.

    A sequence's row holds the first `row.length` of its ids; the others are computed next, as many
    as a pass has space for. A closed batch has no rows, only a queue.
    """

    def __init__(self, max_rows: int, budget: Budget, prefixes: Prefixes) -> None:
        self.max_rows = max_rows
        self.running: list[Sequence] = []  # each has a row
        self.waiting: deque[Sequence] = deque()
        self.admits = True  # whether sequences that wait get rows
        self._budget, self._prefixes = budget, prefixes
        self._rows: dict[Sequence, Row] = {}
        self._label_rows: list[Row] = []  # of the pass under way
        self._reserved_bytes = self._weight_bytes = 0

    def open(self, model: BackendModel, weight_bytes: int) -> None:
        """`weight_bytes`: what the model holds of the budget beside its rows."""
        self.model, self._weight_bytes = model, weight_bytes
        self.max_rows = min(self.max_rows, model.max_rows)

    def close(self) -> None:
        """Drops the model; its last row has been answered."""
        self._prefixes.drop_rows_of(self.model)
        self._budget.withdraw_claim(self)
        del self.model

    @property
    def is_open(self) -> bool:
        return hasattr(self, "model")

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits or is being computed."""
        return bool(self.waiting) or any(s.state is State.PREFILL for s in self.running)

    def kv_bytes(self, model: object = None) -> int:
        """Bytes of keys and values of the running sequences, or of those of one model."""
        return sum(
            row.num_bytes
            for sequence, row in tuple(self._rows.items())
            if model is None or sequence.model is model
        )

    def prefix_bytes(self, model: object) -> int:
        return self._prefixes.bytes_of(model)

    def num_waiting(self, model: object) -> int:
        return sum(sequence.model is model for sequence in self.waiting)

    def num_running(self, model: object) -> int:
        return sum(sequence.model is model for sequence in self.running)

    def siblings(self, first: Sequence) -> list[Sequence]:
        """The other answers to the same prompt, for the same request, that have no token yet."""
        if first.parameters.num_return_sequences == 1:
            return []
        return [
            s
            for s in (*self.running, *self.waiting)
            if s.prompt is first.prompt and s is not first and not s.num_new and not s.over
        ]

    def schedule(self, prefill_tokens: int) -> list[Scheduled]:
        """Chooses the pieces of the next pass: each running sequence's last token, with those that
        its form forced behind it and guesses of the next, and at most `prefill_tokens` of prompts,
        the oldest first."""
        self.drop()
        scheduled = [
            self._next(s, MAX_FORCED_TOKENS) for s in self.running if s.state is State.DECODE
        ]
        prompts = [s for s in self.running if s.state is State.PREFILL]
        while prefill_tokens > 0:
            sequence = prompts.pop(0) if prompts else self._admit()
            if sequence is None:
                break
            labels = sequence.labels
            if labels is not None and self._rows[sequence].length == len(sequence.prompt) - 1:
                parts = self._next_labels(sequence, labels)
            else:
                parts = [self._next(sequence, prefill_tokens)]
            scheduled += parts
            prefill_tokens -= sum(len(part.piece.ids) for part in parts)
        # Rows of one adapter beside each other share the products with its matrices.
        scheduled.sort(key=lambda part: part.piece.adapter.address if part.piece.adapter else 0)
        return scheduled

    def _next(self, sequence: Sequence, count: int) -> Scheduled:
        row, last = self._rows[sequence], len(sequence.ids)
        if sequence.labels is not None:  # its labels come behind all but the last token
            last -= 1
        count = min(count, MAX_SCORED_TOKENS) if sequence.scores_prompt else count
        begin, end = row.length, min(row.length + count, last)
        completes = end == len(sequence.ids)
        wanted = end - begin if sequence.scores_prompt else int(completes)
        sequence.guesses = self._guess(sequence) if completes else []
        ids = [*sequence.ids[begin:end], *sequence.guesses]
        piece = Piece(row, ids, wanted + len(sequence.guesses), sequence.adapter)
        return Scheduled(sequence, piece, completes)

    def _next_labels(self, sequence: Sequence, labels: Labels) -> list[Scheduled]:
        """The prompt's last token with each of the next labels, on rows that share the others."""
        row, last = self._rows[sequence], sequence.prompt[-1:]
        parts: list[Scheduled] = []
        left = MAX_SCORED_TOKENS
        for path in labels.paths[labels.num_scored :][: self._max_label_rows]:
            left -= len(path) + 1
            if parts and left < 0:
                break
            if parts:
                try:
                    self._label_rows.append(self.model.open_row(row, row.length))
                except OutOfMemory:  # fewer at once
                    break
            target = self._label_rows[-1] if parts else row
            piece = Piece(target, last + path, len(path) + 1, sequence.adapter)
            parts.append(Scheduled(sequence, piece, False))
        return parts

    @property
    def _max_label_rows(self) -> int:
        return MAX_LABEL_ROWS if self.model.keeps else 1

    def _guess(self, sequence: Sequence) -> list[int]:
        """Guesses of the tokens that follow. A row has no more tokens with them than at its end.

        With two rows three guesses each pay only where a third of them is right, with eight hardly
        ever.
        """
        guesser, room = sequence.guesser, sequence.max_tokens - len(sequence.ids) - 1
        if guesser is None or not sequence.num_new or room <= 0:
            return []
        alone = len(self.running) == 1 and self.model.checks_guesses
        return guesser.guess(sequence.ids, room) if alone else []

    def take_back(self, sequence: Sequence, length: int) -> None:
        """Shortens a sequence's row to its first `length` tokens, without guesses that were
        wrong."""
        self.model.truncate(self._rows[sequence], length)

    def _admit(self) -> Sequence | None:
        """Gives the first in the queue a row, and memory for its keys and values at its longest: a
        running sequence never has to stop for lack of memory."""
        while self.admits and self.waiting and len(self.running) < self.max_rows:
            sequence = self.waiting[0]
            if self._is_computed_now(sequence):
                return None
            needed = self._kv_bytes([*self.running, sequence]) - self._reserved_bytes
            if self._budget.reserve_kv(needed, self):
                self._reserved_bytes += needed
                self.waiting.popleft()
                self.running.append(sequence)
                sequence.state = State.PREFILL
                try:
                    self._rows[sequence] = self._open_row(sequence)
                except EngineError as error:
                    sequence.fail(error)
                    self.collect()
                    continue
                return sequence
            least = self._kv_bytes([sequence])
            if self._budget.could_hold_kv(least, self._weight_bytes):
                return None
            self.waiting.popleft()
            self._budget.withdraw_claim(self)
            sequence.fail(OutOfMemory(self._budget.explain_kv(least, self._weight_bytes)))
        return None

    def _is_computed_now(self, sequence: Sequence) -> bool:
        """Whether the sequence's prompt is being computed for another answer of its request."""
        return any(s.prompt is sequence.prompt and not s.num_new for s in self.running)

    def _open_row(self, sequence: Sequence) -> Row:
        """A row that begins with what is known of the sequence's tokens: from a running row, or
        one in the prefix cache. At least the last token is computed, for its logits."""
        ids = to_ids(sequence.ids[:-1])
        nearest, length = None, 0
        sharing = self.model.keeps and self._prefixes.limit_bytes > 0
        if not sequence.scores_prompt:
            for other, row in self._rows.items():
                shares = sharing and other.model is sequence.model
                if shares or other.prompt is sequence.prompt:
                    common = shared_length(to_ids(other.ids[: row.length]), ids)
                    if common > length:
                        nearest, length = row, common
        kept = None
        if not sequence.scores_prompt:
            kept = self._prefixes.open_row(self._owner(sequence), ids, length)
        row = kept or self.model.open_row(nearest, length)
        if not sequence.num_new:
            sequence.cached_tokens = row.length
        return row

    def _kv_bytes(self, sequences: list[Sequence]) -> int:
        """Bytes of keys and values of sequences at their longest."""
        lengths = [s.max_tokens for s in sequences]
        for labels in (s.labels for s in sequences if s.labels is not None):
            # behind the first, which has the sequence's own row
            more = labels.paths[1 : self._max_label_rows]
            lengths += [PAGE_TOKENS + labels.longest] * len(more)
        return self.model.kv_bytes_for(lengths)

    def drop(self) -> None:
        """Ends sequences whose client has gone or whose deadline has passed."""
        now = time.monotonic()
        for sequence in (*self.running, *self.waiting):
            if sequence.over:
                sequence.state = State.FINISHED
            elif sequence.deadline is not None and now >= sequence.deadline:
                waited = now - sequence.queued_at
                sequence.fail(
                    DeadlineExceeded(f"the answer was not finished within {waited:.1f} s")
                )
        self.waiting = deque(s for s in self.waiting if s.state is not State.FINISHED)
        if not self.waiting:
            self._budget.withdraw_claim(self)
        self.collect()

    def collect(self) -> None:
        """Closes the rows of finished sequences, or leaves them to the prefix cache, and those of
        labels, which a pass has scored."""
        while self._label_rows:
            self.model.close_row(self._label_rows.pop())
        left = [s for s in self.running if s.state is not State.FINISHED]
        if len(left) == len(self.running):
            return
        for sequence in self.running:
            if sequence.state is State.FINISHED:
                row = self._rows.pop(sequence, None)
                if row is not None and not self._keep(sequence, row):
                    self.model.close_row(row)
        freed = self._reserved_bytes - self._kv_bytes(left)
        self._budget.release_kv(freed)
        self._reserved_bytes -= freed
        self.running = left  # last: another thread may close the model of a batch without work

    def _keep(self, sequence: Sequence, row: Row) -> bool:
        if sequence.failed or not self.model.keeps or not self._prefixes.limit_bytes:
            return False
        return self._prefixes.add(prefix_of(self._owner(sequence), self.model, row, sequence.ids))

    def _owner(self, sequence: Sequence) -> Any:
        """Whose prefixes a sequence may begin with: those of its model, with its adapter."""
        return self if sequence.model is None else sequence.model

    def unfinished(self, model: object = None) -> list[Sequence]:
        """All sequences, or those of one model, that are to go on."""
        return [
            s
            for s in (*self.running, *self.waiting)
            if s.state is not State.FINISHED and (model is None or s.model is model)
        ]

    def remove(self, model: object) -> list[Sequence]:
        """Ends the sequences of one of several models; returns the unfinished ones."""
        left = self.unfinished(model)
        for sequence in left:
            sequence.state = State.FINISHED
        self.waiting = deque(s for s in self.waiting if s.state is not State.FINISHED)
        self.collect()
        self._prefixes.drop(model)
        return left

    def clear(self) -> list[Sequence]:
        """Forgets everything, ahead of the model's end; returns the unfinished sequences."""
        left = self.unfinished()
        self.running, self._rows = [], {}
        self._label_rows.clear()
        self.waiting.clear()
        if self.is_open:
            self._prefixes.drop_rows_of(self.model)
        self._budget.withdraw_claim(self)
        self._budget.release_kv(self._reserved_bytes)
        self._reserved_bytes = 0
        return left


def next_deadline(batches: list[Batch]) -> float | None:
    """The earliest deadline of a waiting sequence, on time.monotonic()."""
    deadlines = [s.deadline for batch in batches for s in batch.waiting if s.deadline is not None]
    return min(deadlines, default=None)
