"""Who computes next: the waiting and running sequences of one model."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from common.errors import DeadlineExceeded, OutOfMemory
from engine.backends.interface import BackendModel
from engine.budget import Budget
from engine.sequence import Sequence, State

# Tokens of a prompt that are computed at once. The edges lie at its multiples, so a text does not
# depend on who computes beside it; a turn has room for as many, so that is what a running row may
# have to wait for: 65 ms on two cores.
PREFILL_CHUNK = {"cpu": 64, "gpu": 256}


@dataclass
class Chunk:
    """The next piece of one sequence's prompt; `completes` it or not.

    Rows behind it that are `copied` are of the same request: they become what its row then is.
    """

    row: int
    ids: list[int]
    completes: bool
    copied: int = 0


class Batch:
    """The sequences of one model. Row i of the backend belongs to `rows[i]`.

    Running rows come first. Behind them there is at most one whose prompt is not yet computed.
    A closed batch has no rows, only a queue.
    """

    def __init__(self, max_rows: int, budget: Budget, chunk: int) -> None:
        self.max_rows = max_rows
        self.rows: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.admits = True  # whether those that wait get rows
        self._budget, self._chunk = budget, chunk
        self._reserved_bytes = self._weight_bytes = 0

    def open(self, model: BackendModel, weight_bytes: int) -> None:
        """`weight_bytes`: what it holds of the budget beside its rows."""
        self.model, self._weight_bytes = model, weight_bytes
        self.max_rows = min(self.max_rows, model.max_rows)

    def close(self) -> None:
        """Lets go of the model; its last row has been answered."""
        del self.model

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.waiting)

    def running(self) -> list[Sequence]:
        """The rows of the next decode step."""
        return [s for s in self.rows if s.state is State.DECODE]

    def _kv_bytes(self, *more: Sequence) -> int:
        """K/V bytes of the rows, and of `more`, at their longest."""
        return self.model.kv_bytes_for([s.max_tokens for s in (*self.rows, *more)])

    def schedule(self, room: int) -> list[Chunk]:
        """Drops who left or came too late; says which pieces of prompts are computed this turn,
        of `room` tokens together."""
        self.drop()
        chunks: list[Chunk] = []
        partial = self.rows[-1] if self.rows and self.rows[-1].state is State.PREFILL else None
        while room > 0:
            sequence = partial or self._admit()
            if sequence is None:
                break
            partial = None
            row = len(self.rows) - 1
            done = self.model.length(row)
            ids = sequence.prompt[done : done + (1 if sequence.is_scored else self._chunk)]
            if len(ids) > room:
                break
            completes = done + len(ids) == len(sequence.prompt)
            chunks.append(Chunk(row, ids, completes))
            room -= len(ids)
            if not completes:
                break
            while self._admit(sequence.prompt):
                chunks[-1].copied += 1
        return chunks

    def _admit(self, prompt: list[int] | None = None) -> Sequence | None:
        """Gives the first in the queue a row, if there is one, and memory for its K/V at its
        longest: a running sequence never has to stop for lack of memory. With `prompt`, only if it
        is of the same request as another that has this prompt."""
        while self.admits and self.waiting and len(self.rows) < self.max_rows:
            sequence = self.waiting[0]
            if prompt is not None and sequence.prompt is not prompt:
                return None
            needed = self._kv_bytes(sequence) - self._reserved_bytes
            if self._budget.reserve_kv(needed):
                self._reserved_bytes += needed
                self.waiting.popleft()
                self.rows.append(sequence)
                sequence.state = State.PREFILL
                self.model.add_row()
                return sequence
            least = sequence.max_tokens * self.model.kv_bytes_per_token
            weights = self._weight_bytes
            if self._budget.could_hold_kv(least if self.rows else needed, weights):
                return None
            self.waiting.popleft()
            sequence.fail(OutOfMemory(self._budget.explain_kv(needed, weights)))
        return None

    def drop(self) -> None:
        """Ends those whose client has gone, or whose deadline has come."""
        now = time.monotonic()
        for sequence in [*self.rows, *self.waiting]:
            if sequence.over:
                sequence.state = State.FINISHED
            elif sequence.deadline is not None and now >= sequence.deadline:
                waited = now - sequence.queued_at
                sequence.fail(
                    DeadlineExceeded(f"the answer was not finished within {waited:.1f} s")
                )
        self.waiting = deque(s for s in self.waiting if s.state is not State.FINISHED)
        self.collect()

    def collect(self) -> None:
        """Closes the rows of finished sequences."""
        for row in reversed(range(len(self.rows))):
            if self.rows[row].state is State.FINISHED:
                self._remove(row)

    def _remove(self, row: int) -> None:
        """Closes a row: the last running row fills the hole, and a prompt behind it moves up."""
        last = len(self.rows) - 1
        if self.rows[last].state is State.PREFILL and row < last - 1:
            self._move(last - 1, row)
            row = last - 1
        if row < last:
            self._move(last, row)
        self.model.remove_last_row()
        self.rows.pop()
        freed = self._reserved_bytes - self._kv_bytes()
        self._budget.release_kv(freed)
        self._reserved_bytes -= freed

    def _move(self, source: int, target: int) -> None:
        self.model.move_row(source, target)
        self.rows[target] = self.rows[source]

    def clear(self) -> list[Sequence]:
        """Forgets everything, ahead of the model's end; returns the sequences that were not
        finished. Asks nothing of the model, which may be why this is called."""
        left = [s for s in [*self.rows, *self.waiting] if s.state is not State.FINISHED]
        self.rows.clear()
        self.waiting.clear()
        self._budget.release_kv(self._reserved_bytes)
        self._reserved_bytes = 0
        return left
