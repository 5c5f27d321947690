"""Who computes next: the waiting and running sequences of one model."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from common.errors import DeadlineExceeded, OutOfMemory
from engine.backends.interface import BackendModel
from engine.budget import Budget
from engine.prefixes import COPIES, Prefix, Prefixes, shared
from engine.sequence import Sequence, State

# Tokens of an answer that may end before those to the same prompt have their turns.
SHORT = 16
LIKE = 4  # tokens of an answer that do not come back by chance


@dataclass
class Source:
    """Where the first `length` tokens of a row come from: another row, or a prefix that was kept,
    which nobody else wants if it is the `last` use of it."""

    length: int
    row: int | None = None
    prefix: Prefix | None = None
    last: bool = False


@dataclass
class Chunk:
    """The next piece of one sequence's prompt, computed or, with a `source`, not; `completes` it or
    not."""

    row: int
    ids: list[int]
    completes: bool
    source: Source | None = None

    @property
    def cost(self) -> int:
        """Of a turn's room, in tokens that are computed."""
        copied = 0 if self.source is None or self.source.last else self.source.length
        return len(self.ids) + copied // COPIES


class Batch:
    """The sequences of one model. Row i of the backend belongs to `rows[i]`.

    Running rows come first. Behind them there is at most one whose prompt is not yet computed.
    A closed batch has no rows, only a queue.
    """

    def __init__(self, max_rows: int, budget: Budget, chunk: int, prefixes: Prefixes) -> None:
        """Of a prompt `chunk` tokens are computed at once, each time from a multiple of the model's
        piece, so a text does not depend on who computes beside it."""
        self.max_rows = max_rows
        self.rows: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.admits = True  # whether those that wait get rows
        self.completing = False  # see `complete`
        self._comes_back = False  # whether answers have come back in other prompts
        self._budget, self._chunk, self._prefixes = budget, chunk, prefixes
        self._reserved_bytes = self._weight_bytes = 0

    def open(self, model: BackendModel, weight_bytes: int) -> None:
        """`weight_bytes`: what it holds of the budget beside its rows."""
        self.model, self._weight_bytes = model, weight_bytes
        self.max_rows = min(self.max_rows, model.max_rows)

    def close(self) -> None:
        """Lets go of the model; its last row has been answered."""
        self._prefixes.drop(self)
        del self.model

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.waiting) or self.completing

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits or is being computed."""
        return bool(self.waiting) or self._prefilling is not None

    @property
    def _prefilling(self) -> Sequence | None:
        last = self.rows[-1] if self.rows else None
        return last if last is not None and last.state is State.PREFILL else None

    @property
    def prefix_bytes(self) -> int:
        """What is kept of its rows that are done."""
        return self._prefixes.bytes_of(self)

    def running(self) -> list[Sequence]:
        """The rows of the next decode step."""
        return [s for s in self.rows if s.state is State.DECODE]

    def others_to(self, first: Sequence) -> list[Sequence]:
        """Those that answer the same prompt for the same request, and have no token yet."""
        everybody = [*self.rows, *self.waiting] if first.parameters.num_return_sequences > 1 else []
        return [
            s
            for s in everybody
            if s.prompt is first.prompt and s is not first and not s.num_new and not s.over
        ]

    def _kv_bytes(self, *more: Sequence) -> int:
        """K/V bytes of the rows, and of `more`, at their longest."""
        return self.model.kv_bytes_for([s.max_tokens for s in (*self.rows, *more)])

    def schedule(self, room: int) -> list[Chunk]:
        """Drops who left or came too late; says which pieces of prompts are computed this turn,
        of `room` tokens together."""
        self.drop()
        chunks: list[Chunk] = []
        sequence = self._prefilling
        done = self.model.length(len(self.rows) - 1) if sequence else 0
        while room > 0 or (sequence is None and self._follows(chunks)):
            if sequence is None:
                sequence = self._admit()
                if sequence is None:
                    break
                source = self._source(sequence, chunks)
                done = 0 if source is None else source.length
                if source is not None:
                    completes = done == len(sequence.prompt)
                    chunks.append(Chunk(len(self.rows) - 1, [], completes, source))
                    room -= chunks[-1].cost
            if done < len(sequence.prompt):
                ids = sequence.prompt[done : self._edge(sequence, done)]
                if len(ids) > room:
                    break
                done += len(ids)
                chunks.append(Chunk(len(self.rows) - 1, ids, done == len(sequence.prompt)))
                room -= len(ids)
            if done == len(sequence.prompt):
                sequence = None
        return chunks

    def _edge(self, sequence: Sequence, done: int) -> int:
        """Where the next chunk of a prompt ends. A last token is not left for one of its own, whose
        kernel is another, where a prompt that begins with kept tokens would have more in it."""
        if sequence.is_scored:
            return done + 1
        piece, prompt = self.model.piece, sequence.prompt
        edge = done + self._chunk - done % piece
        return edge - piece if edge + 1 == len(prompt) and piece < self._chunk else edge

    def _follows(self, chunks: list[Chunk]) -> bool:
        """Whether the next in the queue can be a copy of one whose prompt is complete now, and who
        may have gone by the next turn."""
        if not chunks or not chunks[-1].completes or not self.waiting:
            return False
        last, following = self.rows[chunks[-1].row], self.waiting[0]
        return following.prompt is last.prompt and last.parameters.max_new_tokens <= SHORT

    def _source(self, sequence: Sequence, chunks: list[Chunk]) -> Source | None:
        """Whose keys and values a sequence with a new row begins with, if anybody's.

        Of another request's only those of whole pieces, which its own prompt would get as well:
        so its text is the same, bit for bit, as if there were nobody else."""
        completed = [self.rows[chunk.row] for chunk in chunks if chunk.completes]
        for row, other in enumerate(self.rows[:-1]):
            if other.prompt is sequence.prompt and (other.logits is not None or other in completed):
                return Source(len(sequence.prompt), row)
        if sequence.is_scored or not self._prefixes.limit_bytes:
            return None
        # The logits after the last have to be computed, which alone is not like beside others.
        alone = self.model.piece == self._chunk and len(sequence.prompt) % self._chunk == 1
        ids = sequence.prompt[: -1 if alone else -2]
        running = [
            (shared(self._whole(i), ids, self.model.piece), i) for i in range(len(self.rows) - 1)
        ]
        length, nearest = max(running, default=(0, 0))
        prefix, kept = self._prefixes.longest(self, ids, self.model.piece)
        if prefix is not None and kept >= length:
            sequence.cached_tokens = kept
            last = self._is_last(prefix, kept) and self._prefixes.take(prefix)
            after = sequence.prompt[kept : kept + len(prefix.tail)]
            self._comes_back |= kept == len(prefix.ids) and len(after) > 0 and after == prefix.tail
            return Source(kept, None, prefix, last)
        sequence.cached_tokens = length
        return Source(length, nearest) if length else None

    def _is_last(self, prefix: Prefix, length: int) -> bool:
        """Whether whoever takes so much of it may have all: nobody who waits begins like it, and
        what it has besides is less than copying what is wanted."""
        more = len(prefix.ids) - length
        wanted = any(
            s.prompt[: self.model.piece] == prefix.ids[: self.model.piece] for s in self.waiting
        )
        return more * COPIES <= length and not wanted

    def fill(self, row: int, source: Source) -> None:
        """Has a row begin as its source does."""
        if source.row is not None:
            self.model.copy_row(source.row, row, source.length)
        elif source.prefix is not None:
            self.model.fill_row(row, source.prefix.kept, source.length, source.last)

    def _whole(self, row: int) -> list[int]:
        """Those of a row's tokens that any prompt which begins with them has the same keys and
        values of: of its prompt, what was computed in whole pieces."""
        sequence = self.rows[row]
        if sequence.is_scored:
            return []
        known = min(self.model.length(row), len(sequence.prompt))
        return sequence.prompt[: known // self.model.piece * self.model.piece]

    def _admit(self) -> Sequence | None:
        """Gives the first in the queue a row, if there is one, and memory for its K/V at its
        longest: a running sequence never has to stop for lack of memory."""
        while self.admits and self.waiting and len(self.rows) < self.max_rows:
            sequence = self.waiting[0]
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
        self._keep(row)
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

    def _keep(self, row: int) -> None:
        """Keeps what another prompt can begin with, if there is room."""
        sequence, piece = self.rows[row], self.model.piece
        if sequence.failed or not self.model.keeps or not self._prefixes.limit_bytes:
            return
        ids, text = self._whole(row), sequence.ids[: len(sequence.ids) // piece * piece]
        # To complete it takes a piece at a time, and somebody may come who has to wait for that.
        wanted = (sequence.is_chat or self._comes_back) and piece < self._chunk
        rest = text[len(ids) :] if wanted and not sequence.is_scored else []
        size = len(ids + rest) * self.model.kv_bytes_per_token
        if self._prefixes.wants(self, ids + rest, size):
            tail = sequence.ids[len(ids) : len(sequence.prompt) + LIKE]
            kept = self.model.keep_row(row, len(ids))
            self._prefixes.add(Prefix(self, ids, kept, rest, tail))

    def complete(self, prefix: Prefix) -> None:
        """Computes one more piece of what was kept, while nothing is in the batch."""
        if not self._prefixes.take(prefix):
            return
        done, piece = len(prefix.ids), self.model.piece
        row = self.model.add_row()
        try:
            self.model.fill_row(row, prefix.kept, done, True)
            self.model.extend(row, np.array(prefix.rest[:piece]))
            ids, rest = prefix.ids + prefix.rest[:piece], prefix.rest[piece:]
            kept = self.model.keep_row(row, len(ids))
            self._prefixes.add(Prefix(self, ids, kept, rest))
        finally:
            self.model.remove_last_row()

    def _move(self, source: int, target: int) -> None:
        self.model.move_row(source, target)
        self.rows[target] = self.rows[source]

    def clear(self) -> list[Sequence]:
        """Forgets everything, ahead of the model's end; returns the sequences that were not
        finished. Asks nothing of the model, which may be why this is called."""
        left = [s for s in [*self.rows, *self.waiting] if s.state is not State.FINISHED]
        self.rows.clear()
        self.waiting.clear()
        self._prefixes.drop(self)
        self._budget.release_kv(self._reserved_bytes)
        self._reserved_bytes = 0
        return left
