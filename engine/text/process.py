"""A model's texts, in a process of their own: a tokenizer that stalls, crashes or takes all memory
costs its own model's requests, and no other's.

All that is asked of the process is asked by one thread, a model's text thread: prompts are cut and
sequences queued there, and there their tokens, which the engine's thread has chosen, get their
texts and are told. What one step gave all rows is one message.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from common.errors import (
    ArtifactError,
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from common.parameters import Parameters
from engine.artifacts.artifact import Artifact
from engine.sandbox import Limits, Sandbox, again
from engine.sequence import Sequence, Token
from engine.statistics import Statistics
from engine.text import child as text_child
from engine.text.prompts import Chat, Inputs, Raw

# How long the process may take to read a tokenizer; to cut a prompt, of megabytes if need be; to
# make the text of what a few steps gave.
LOAD_S = 20.0
ENCODE_S = 5.0
WRITE_S = 5.0
MEMORY_MIB = 512
# A token's text in the mean of an answer. Those of real vocabularies have some dozens.
MAX_CHARACTERS_PER_TOKEN = 1024

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Texts:
    """Thread-safe. `close` ends the thread and the process."""

    stop_ids: frozenset[int]

    def __init__(self, artifact: Artifact, statistics: Statistics, most_waiting: int) -> None:
        """Does not wait for the process: `ready` does, once, before anything is asked."""
        generation = artifact.generation.to_json()
        self.file = artifact.tokenizer_file.name
        self._arguments = (str(artifact.tokenizer_file), asdict(artifact.config), generation)
        self._defaults = artifact.generation.parameters
        self._vocab_size = artifact.config.vocab_size
        self._statistics, self._most_waiting = statistics, most_waiting
        self._child = self._fork()
        self._keys = itertools.count()
        self._rows: dict[Sequence, int] = {}  # that the process knows, by key
        self._changed = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._written: list[Sequence] = []
        self._telling = False
        self._closed: EngineError | None = None
        self._ready, self._readying = False, threading.Lock()

    def ready(self) -> Texts:
        """Itself, once the process is there.

        Raises `ArtifactError` that says what is wrong with the tokenizer or its settings.
        """
        with self._readying:
            if not self._ready:
                first = [self._child]
                self._child = again(lambda: _opened(first.pop() if first else self._fork()))
                try:
                    about = self._child.call("about", timeout_s=LOAD_S)
                except BaseException:
                    self._child.kill()
                    raise
                self.stop_ids = frozenset(about["stop_ids"])
                self._special_ids = self.stop_ids.union(about["special_ids"])
                threading.Thread(target=self._run, name="texts", daemon=True).start()
                self._ready = True
        return self

    def _fork(self) -> Sandbox:
        limits = Limits(MEMORY_MIB)
        return Sandbox(text_child.serve, *self._arguments, what=self.file, limits=limits)

    @property
    def pid(self) -> int | None:
        """Of the process, if it lives."""
        return self._child.pid

    def parameters(self, given: Any) -> Parameters:
        """A request's, and the model's own where it gives none. Raises `InvalidRequest`."""
        parameters = Parameters.parse(given, self._defaults)
        for token, _ in parameters.logit_bias:
            if token >= self._vocab_size:
                raise InvalidRequest(
                    f"parameters.logit_bias has the token {token}, but the model's vocabulary ends"
                    f" at {self._vocab_size - 1}"
                )
        return parameters

    def soon(self, task: Callable[[], Result]) -> Future[Result]:
        """Runs `task` on the text thread. Raises `Overloaded` where too many wait for that."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._closed is not None:
                    raise self._closed
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        with self._changed:
            if len(self._tasks) >= self._most_waiting:
                message = f"{len(self._tasks)} requests wait for their prompts to be cut already"
                raise Overloaded(message, retry_after_s=ENCODE_S)
            if self._closed is not None:
                raise self._closed
            self._tasks.append(run)
            self._changed.notify()
        return future

    def encode(self, inputs: Inputs) -> list[int]:
        """The ids of a prompt; on the text thread.

        Raises `InvalidRequest`, `PromptTooLong`, and what `_call` does.
        """
        if isinstance(inputs, Raw):
            ids = self._call(ENCODE_S, "encode_raw", inputs.prompt)
        elif isinstance(inputs, Chat):
            ids = self._call(ENCODE_S, "encode_chat", inputs.messages)
        else:
            ids = self._call(ENCODE_S, "encode", inputs)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise self._give_up("it gave no ids")
        return ids

    def rest(self) -> None:
        """Ends the process until it is needed again, unless it is."""

        def rest() -> None:
            if not self._owed():
                self._rows.clear()
                self._child.kill("it is not needed")

        with self._changed:
            if not self._tasks and not self._written:
                self._tasks.append(rest)
                self._changed.notify()

    def write(self, sequences: list[Sequence]) -> None:
        """Has the tokens that wait in these sequences told with their texts. Does not block."""
        with self._changed:
            self._written += sequences
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Whether nobody is owed a text."""
        with self._changed:
            return not (self._written or self._telling or self._owed())

    def _owed(self) -> bool:
        """Who is cancelled leaves with the next tokens of others, which may never come."""
        return not all(sequence.over for sequence in list(self._rows))

    def close(self, reason: EngineError) -> None:
        """Ends the process; whom it still owed an answer is told the reason. Does not block."""
        with self._changed:
            self._closed = reason
            self._changed.notify()
        self._child.kill()

    # On the text thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._telling = False
                self._changed.wait_for(lambda: self._written or self._tasks or self._closed)
                written, self._written = self._written, []
                self._telling = bool(written)
                task = self._tasks.popleft() if self._tasks and not written else None
            if self._closed is not None:
                self._end(written, self._closed)
                if task is not None:
                    task()
                elif not written:
                    return
            elif written:
                try:
                    self._tell(written)
                except Exception:
                    logger.exception("the texts of %s failed", self.file)
                    self._end(written, EngineError("the answer could not be given"))
            elif task is not None:
                task()

    def _end(self, sequences: list[Sequence], reason: EngineError) -> None:
        for sequence in [*self._rows, *sequences]:
            sequence.tell(reason)
        self._rows.clear()

    def _tell(self, sequences: list[Sequence]) -> None:
        taken = [(s, token) for s in dict.fromkeys(sequences) for token in s.take()]
        left = [self._rows.pop(sequence) for sequence in list(self._rows) if sequence.over]
        taken = [(sequence, token) for sequence, token in taken if not sequence.over]
        begun = []
        for sequence in dict.fromkeys(sequence for sequence, _ in taken):
            if sequence not in self._rows:
                self._rows[sequence] = key = next(self._keys)
                begun.append((key, sequence.prompt, sequence.parameters.stop))
        tokens = [
            (self._rows[sequence], token.id, token.finish_reason, token.shown)
            for sequence, token in taken
        ]
        if not tokens and not left:
            return
        try:
            texts = self._call(WRITE_S, "write", begun, left, tokens)
            if not isinstance(texts, list) or len(texts) != len(tokens):
                raise self._give_up("it gave other texts than were asked for")
        except EngineError as error:
            logger.error("the texts of %s failed: %s", self.file, error.message)
            self._end([], error)
            return
        for (sequence, token), found in zip(taken, texts, strict=True):
            if not sequence.over:
                self._told(sequence, token, found)

    def _told(self, sequence: Sequence, token: Token, found: Any) -> None:
        message = found if isinstance(found, str) else f"{self.file} gave no text"
        if isinstance(found, list) and len(found) == 3 and isinstance(found[0], str):
            try:
                token.pieces = [str(piece).encode("latin-1") for piece in found[2]]
            except (TypeError, ValueError):
                token.pieces = []
            token.text = found[0].encode("utf-8", "replace").decode()
            token.special_ids = self._special_ids
            sequence.characters += len(token.text)
            message = f"{self.file} makes more text of an answer than any has"
            if sequence.characters <= MAX_CHARACTERS_PER_TOKEN * sequence.max_tokens:
                message = ""
        if message:
            sequence.tell(EngineError(message))
            return
        if found[1]:
            token.finish_reason = "stop"
        self._statistics.tokens += 1
        sequence.tell(token)
        if token.finish_reason is not None:
            self._rows.pop(sequence, None)
            self._statistics.finished(time.monotonic() - sequence.queued_at)

    def _call(self, timeout_s: float, *arguments: Any) -> Any:
        """Asks the process, a new one if the last has ended; once more where it ended while a
        prompt was cut, for it may have been killed long before.

        Raises what it raises, `DeadlineExceeded` if it stalls, `EngineUnavailable` if it is lost
        with all others, `EngineError` if it ends.
        """
        for last in (arguments[0] == "write", True):
            began = time.monotonic()
            try:
                if not self._child.alive:
                    self._child = again(lambda: _opened(self._fork()))
                    if self._closed is not None:
                        self._child.kill()
                    began = time.monotonic()
                return self._child.call(*arguments, timeout_s=timeout_s)
            except (ArtifactError, EngineUnavailable) as error:
                if self._closed is not None:
                    raise self._closed from None
                kind = EngineUnavailable if isinstance(error, EngineUnavailable) else EngineError
                if late := time.monotonic() - began >= timeout_s:
                    kind = DeadlineExceeded
                ended = not self._child.alive
                failure = self._give_up(error.message, kind)
                if last or late or not ended:
                    raise failure from None
        raise AssertionError("it was returned or raised")

    def _give_up(self, why: str, kind: type[EngineError] = EngineError) -> EngineError:
        """Ends the process, and the answers that it knew; the next call starts another."""
        self._child.kill()
        error = kind(f"the tokenizer's process ended: {why}")
        self._end([], error)
        return error


def _opened(child: Sandbox) -> Sandbox:
    """It, once it has read the tokenizer."""
    try:
        child.ready(LOAD_S)
    except BaseException:
        child.kill()
        raise
    return child
