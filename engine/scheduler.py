"""Continuous batching: the waiting and running sequences of one core."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

from common.errors import DeadlineExceeded, EngineError, OutOfMemory
from engine.backends.interface import BackendModel, Piece, Row
from engine.budget import Budget
from engine.labels import Labels
from engine.native.library import PAGE_TOKENS
from engine.prefixes import Prefix, Prefixes, key_of, shared_length
from engine.sequence import Sequence, State

# Most prompt tokens of a sequence in a pass if each of them needs logits, which take 200 KB a token
# with a vocabulary of 50,000. Larger: more memory.
MAX_SCORED_TOKENS = 64
# Most labels of a choice that a pass scores. Each has a row whose first page may be a copy, so
# sixteen rows take 20 MB with a model of KoGPT2's size. Larger: more memory, fewer passes.
MAX_LABEL_ROWS = 16
# Most tokens of a sequence in a pass that its form has forced. Larger: other sequences wait longer.
MAX_FORCED_TOKENS = 16


@dataclass
class Scheduled:
    """A sequence's part of the next pass: its next token, or tokens of its prompt."""

    sequence: Sequence
    piece: Piece
    completes: bool  # whether logits after the sequence's last token are computed

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens that count as prefill: 0 for a decode step of one token."""
        count = len(self.piece.ids) - len(self.sequence.guesses)
        return count if count > 1 or not self.completes else 0


class Batch:
    """The running sequences of a core, which have rows, and its queue of waiting ones.

    A row has the keys and values of the first `row.length` ids of its sequence; the next pass
    computes more of them. The batch of a core that is not resident is closed: it has a queue only.

    Other threads than the step loop's queue requests: methods that read or change the queue or the
    running sequences are called with the engine's lock, `Loop.changed`.
    """

    def __init__(self, max_rows: int, budget: Budget, prefixes: Prefixes) -> None:
        self.max_rows = max_rows
        self.running: list[Sequence] = []  # each has a row
        self.waiting: deque[Sequence] = deque()
        self.admits = True  # whether waiting sequences get rows; False while the core drains
        self._budget, self._prefixes = budget, prefixes
        self._model: BackendModel | None = None  # while the core is resident
        self._rows: dict[Sequence, Row] = {}
        self._label_rows: list[Row] = []  # of the pass under way
        self._reserved_bytes = self._weight_bytes = 0

    def open(self, model: BackendModel, weight_bytes: int) -> None:
        """Open the batch on a resident model; `weight_bytes` is its part of the budget."""
        self._model, self._weight_bytes = model, weight_bytes

    def close(self) -> None:
        """Close the batch of an evicted core, which runs no sequence, and drop its prefixes."""
        self._prefixes.drop_rows_of(self.model)
        self._budget.withdraw_claim(self)
        self._model = None

    @property
    def model(self) -> BackendModel:
        """The resident model of an open batch."""
        assert self._model is not None
        return self._model

    @property
    def row_limit(self) -> int:
        """The most rows at the same time: `max_rows`, or those that the model can have."""
        return self.max_rows if self._model is None else min(self.max_rows, self._model.max_rows)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits or is being computed."""
        return bool(self.waiting) or any(s.state is State.PREFILL for s in self.running)

    def kv_bytes(self, model: object = None) -> int:
        """Return the K/V bytes of running sequences, of `model` or of all models."""
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
        """Return the other answers of `first`'s request that have no token yet."""
        if first.parameters.num_return_sequences == 1:
            return []
        return [
            s
            for s in (*self.running, *self.waiting)
            if s.prompt is first.prompt
            and s is not first
            and not (s.num_new or s.over or s.awaits_form)
        ]

    def schedule(self, prefill_tokens: int) -> list[Scheduled]:
        """Choose the pieces of the next pass.

        They are the last token of each sequence that decodes, with forced tokens and guesses behind
        it, and at most `prefill_tokens` of prompts, oldest first.
        """
        self.drop_expired()
        scheduled = [
            self._next(s, MAX_FORCED_TOKENS)
            for s in self.running
            if s.state is State.DECODE and not s.awaits_form
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
        if any(part.piece.adapter for part in scheduled):
            # The library multiplies neighboring rows of one adapter by its matrices at once.
            scheduled.sort(key=lambda part: part.piece.adapter.address if part.piece.adapter else 0)
        return scheduled

    def _next(self, sequence: Sequence, count: int) -> Scheduled:
        row, last = self._rows[sequence], len(sequence.ids)
        if sequence.labels is not None:  # the last token is computed with each label
            last -= 1
        count = min(count, MAX_SCORED_TOKENS) if sequence.scores_prompt else count
        begin, end = row.length, min(row.length + count, last)
        completes = end == len(sequence.ids)
        wanted = end - begin if sequence.scores_prompt else int(completes)
        sequence.set_guesses(self._guess(sequence) if completes else [])
        ids = [*sequence.ids[begin:end], *sequence.guesses]
        piece = Piece(row, ids, wanted + len(sequence.guesses), sequence.adapter)
        return Scheduled(sequence, piece, completes)

    def _next_labels(self, sequence: Sequence, labels: Labels) -> list[Scheduled]:
        """Schedule the prompt's last token with each of the next labels, on rows of their own."""
        row, last = self._rows[sequence], sequence.prompt[-1:]
        parts: list[Scheduled] = []
        remaining = MAX_SCORED_TOKENS
        for path in labels.paths[labels.num_scored :][: self._max_label_rows]:
            remaining -= len(path) + 1
            if parts and remaining < 0:
                break
            if parts:
                try:
                    self._label_rows.append(self.model.open_row(row, row.length))
                except (OutOfMemory, MemoryError):  # score fewer at once
                    break
            target = self._label_rows[-1] if parts else row
            piece = Piece(target, last + path, len(path) + 1, sequence.adapter)
            parts.append(Scheduled(sequence, piece, False))
        return parts

    @property
    def _max_label_rows(self) -> int:
        return MAX_LABEL_ROWS if self.model.caches_rows else 1

    def _guess(self, sequence: Sequence) -> list[int]:
        """Return guesses of the next tokens, at most as many as the row can hold.

        Only a sequence that runs alone gets any: with two rows, three guesses each save time only
        if a third of them is right, with eight rows almost never.
        """
        guesser, most = sequence.guesser, sequence.max_tokens - len(sequence.ids) - 1
        if guesser is None or not sequence.num_new or most <= 0:
            return []
        alone = len(self.running) == 1 and self.model.checks_guesses
        return guesser.guess(sequence.ids, most) if alone else []

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Shorten a sequence's row to its first `length` tokens, to drop wrong guesses."""
        self.model.truncate(self._rows[sequence], length)

    def _admit(self) -> Sequence | None:
        """Open a row for the first waiting sequence, if there is memory for all of its tokens."""
        while self.admits and self.waiting and len(self.running) < self.row_limit:
            # The first token of some may have been chosen with that of another answer.
            sequence = next((s for s in self.waiting if not s.awaits_form), None)
            if sequence is None:
                return None
            begun = (s for s in self.running if s.prompt is sequence.prompt)
            if any(not (s.num_new or s.awaits_form) for s in begun):
                return None  # another answer of the same request is computing the prompt
            needed = self._kv_bytes([*self.running, sequence]) - self._reserved_bytes
            if self._budget.reserve_kv(needed, self):
                self._reserved_bytes += needed
                self.waiting.remove(sequence)
                self.running.append(sequence)
                sequence.state = State.PREFILL
                try:
                    self._rows[sequence] = self._open_row(sequence)
                except (EngineError, MemoryError) as error:
                    known = error if isinstance(error, EngineError) else None
                    sequence.fail(known or OutOfMemory("there is no memory for another row"))
                    self._remove_finished()  # the pass needs the rows of labels
                    continue
                return sequence
            problem = self._budget.kv_problem(self._kv_bytes([sequence]), self._weight_bytes)
            if problem is None:
                return None
            self.waiting.remove(sequence)
            self._budget.withdraw_claim(self)
            sequence.fail(OutOfMemory(problem))
        return None

    def _open_row(self, sequence: Sequence) -> Row:
        """Open a row with the longest prefix that is computed already, except the last token."""
        key = key_of(sequence.ids[:-1])
        nearest, length, cached = None, 0, None
        if not sequence.scores_prompt:
            sharing = self.model.caches_rows and self._prefixes.limit_bytes > 0
            for other, row in self._rows.items():
                shares = sharing and other.model is sequence.model
                if shares or other.prompt is sequence.prompt:
                    common = shared_length(key_of(other.ids[: row.length]), key)
                    if common > length:
                        nearest, length = row, common
            cached = self._prefixes.open_row(sequence.model, key, length)
        row = cached or self.model.open_row(nearest, length)
        if not sequence.num_new:
            sequence.cached_tokens = row.length
        return row

    def _kv_bytes(self, sequences: list[Sequence]) -> int:
        """Return the K/V bytes of sequences with all tokens that they may get."""
        lengths = [s.max_tokens for s in sequences]
        for labels in (s.labels for s in sequences if s.labels is not None):
            more = labels.paths[1 : self._max_label_rows]  # the first is on the sequence's own row
            lengths += [PAGE_TOKENS + labels.longest] * len(more)
        return self.model.kv_bytes_for(lengths)

    def awaiting_forms(self) -> list[Sequence]:
        """Return the sequences that sit out passes until the masks of their forms are there."""
        return [s for s in (*self.running, *self.waiting) if s.awaits_form]

    def drop_expired(self) -> None:
        """End sequences that are cancelled or past their deadlines."""
        now = time.monotonic()
        for sequence in (*self.running, *self.waiting):
            if sequence.over:
                sequence.finish()
            elif sequence.deadline is not None and now >= sequence.deadline:
                waited = now - sequence.queued_at
                sequence.fail(
                    DeadlineExceeded(f"the answer was not finished within {waited:.1f} s")
                )
        self.close_finished()

    def end(self, reason: EngineError, model: object = None) -> None:
        """End the sequences of `model`, or of all models, and drop their cached prefixes."""
        for sequence in self.unfinished(model):
            sequence.fail(reason)
        with ExitStack() as steps:  # each is done even if another raises
            if model is not None:
                steps.callback(self._prefixes.drop, model)
            elif self._model is not None:
                steps.callback(self._prefixes.drop_rows_of, self._model)
            self.close_finished()

    def close_finished(self) -> None:
        """Remove finished sequences, and close the rows of scored labels."""
        with ExitStack() as steps:
            steps.callback(self._remove_finished)
            while self._label_rows:
                steps.callback(self.model.close_row, self._label_rows.pop())

    def _remove_finished(self) -> None:
        """Remove finished sequences and free all that they hold, even if a row cannot be closed."""
        if any(s.state is State.FINISHED for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if s.state is not State.FINISHED)
        if not self.waiting:
            self._budget.withdraw_claim(self)
        finished = [s for s in self.running if s.state is State.FINISHED]
        if not finished:
            return
        self.running = [s for s in self.running if s.state is not State.FINISHED]
        with ExitStack() as steps:
            steps.callback(self._release_kv)  # last: a dense cache shrinks as rows are closed
            for sequence in finished:
                steps.callback(self._close_row, sequence)

    def _release_kv(self) -> None:
        """Release the reserved bytes that the running sequences do not need."""
        freed = self._reserved_bytes - (self._kv_bytes(self.running) if self.running else 0)
        self._budget.release_kv(freed)
        self._reserved_bytes -= freed

    def _close_row(self, sequence: Sequence) -> None:
        """Close the row of a finished sequence, or cache it."""
        row = self._rows.pop(sequence, None)
        if row is not None and not self._cache_prefix(sequence, row):
            self.model.close_row(row)

    def _cache_prefix(self, sequence: Sequence, row: Row) -> bool:
        if sequence.failed or not self.model.caches_rows or not self._prefixes.limit_bytes:
            return False
        key = key_of(sequence.ids[: row.length])  # ids whose keys and values are computed
        return self._prefixes.add(Prefix(sequence.model, key, row, self.model))

    def unfinished(self, model: object = None) -> list[Sequence]:
        """Return the unfinished sequences, of `model` or of all models."""
        return [
            s
            for s in (*self.running, *self.waiting)
            if s.state is not State.FINISHED and (model is None or s.model is model)
        ]
