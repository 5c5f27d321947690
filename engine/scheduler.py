"""Continuous batching: the waiting and running sequences of one core."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack

from common.errors import DeadlineExceeded, EngineError, OutOfMemory
from engine.backends.interface import BackendModel, Row
from engine.budget import Budget
from engine.prefixes import Prefix, Prefixes, key_of, shared_length
from engine.sequence import Scheduled, Sequence, State

# Most tokens of a sequence that decodes in a pass: a form may have forced all but the first.
# Larger: other sequences wait longer.
MAX_DECODE_TOKENS = 16
# Most tokens of texts to classify in a pass while any sequence decodes: a list keeps passes full
# for long. On two processors with AVX2 and KoGPT2 in int8, the 99th percentile of the gaps between
# tokens is 14 ms alone, and 36 beside a list with 16. Larger: longer gaps. Smaller: slower lists.
MAX_TEXT_TOKENS = 8


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
        self._pass_rows: list[Row] = []  # of the pass under way, beside those of the sequences
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
        if not first.has_siblings:
            return []
        return [
            s
            for s in (*self.running, *self.waiting)
            if s.prompt is first.prompt
            and s is not first
            and not (s.num_new or s.over or s.blocked)
        ]

    def schedule(self, prefill_tokens: int, decodes: bool = False) -> list[Scheduled]:
        """Choose the pieces of the next pass.

        They are the last token of each sequence that decodes, with what its kind adds, and at most
        `prefill_tokens` of prompts, oldest first.

        decodes: whether any sequence does, also of other cores
        """
        self.drop_expired()
        scheduled: list[Scheduled] = []
        for sequence in self.running:
            if sequence.state is State.DECODE and not sequence.blocked:
                scheduled += self._next(sequence, MAX_DECODE_TOKENS)
        prompts = [s for s in self.running if s.state is State.PREFILL]
        while prefill_tokens > 0:
            prompt = prompts.pop(0) if prompts else self._admit()
            if prompt is None:
                break
            if decodes and prompt.is_bulk:
                prefill_tokens = min(prefill_tokens, MAX_TEXT_TOKENS)
            parts = self._next(prompt, prefill_tokens)
            scheduled += parts
            prefill_tokens -= sum(len(part.piece.ids) for part in parts)
        if any(part.piece.adapter for part in scheduled):
            # The library multiplies neighboring rows of one adapter by its matrices at once.
            scheduled.sort(key=lambda part: part.piece.adapter.address if part.piece.adapter else 0)
        return scheduled

    def _next(self, sequence: Sequence, most: int) -> list[Scheduled]:
        row, alone = self._rows[sequence], len(self.running) == 1
        parts = sequence.next_parts(row, most, self.model, alone)
        self._pass_rows += [part.piece.row for part in parts if part.piece.row is not row]
        return parts

    def _admit(self) -> Sequence | None:
        """Open a row for the first waiting sequence, if there is memory for all of its tokens."""
        while self.admits and self.waiting and len(self.running) < self.row_limit:
            # The first token of some may have been chosen with that of another answer.
            sequence = next((s for s in self.waiting if not s.blocked), None)
            if sequence is None:
                return None
            begun = (s for s in self.running if s.prompt is sequence.prompt)
            if any(not (s.num_new or s.blocked) for s in begun):
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
                    self._remove_finished()  # the pass needs `_pass_rows`
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
        if sequence.uses_prefix:
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
        lengths = [n for s in sequences for n in s.row_lengths(self.model)]
        return self.model.kv_bytes_for(lengths)

    def blocked(self) -> list[Sequence]:
        """Return the sequences that sit out passes until they are settled."""
        return [s for s in (*self.running, *self.waiting) if s.blocked]

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
        """Remove finished sequences, and close the rows of the pass under way."""
        with ExitStack() as steps:
            steps.callback(self._remove_finished)
            while self._pass_rows:
                steps.callback(self.model.close_row, self._pass_rows.pop())

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
        cached = sequence.caches_prefix and self.model.caches_rows and self._prefixes.limit_bytes
        if sequence.failed or not cached:
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
