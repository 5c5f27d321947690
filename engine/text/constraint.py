"""Constrained decoding: which tokens may come next where an answer is held to a form.

llguidance compiles forms and computes the sets of tokens, the masks. It is foreign code that works
on what clients send, and its own limits do not bound its time or memory. So each form has a process
of its own (`engine.text.form_child`), with limits of both, forked within 10 ms from one that has
the tokenizer's tokens. A form that is late or large delays only its own answers, and ending its
process ends all of its work. A process for all forms of a tokenizer would need to find out which of
them is to blame, and to bring the answers of the others to another process.

A mask is computed while the step loop goes on. A row whose mask is late sits out passes.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from common.errors import (
    ArtifactError,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
)
from common.form import Form
from engine.native import library
from engine.sandbox import Limits, Sandbox, again
from engine.text import form_child
from engine.text.table import PROCESS, Table

Logits = NDArray[np.float32]
# Logits and tokens (V,) that a tokenizer's constraints return, reused on the engine's thread.
Buffers = tuple[Logits, NDArray[np.int32]]

# Processes of one tokenizer's forms, some 5 MB each. Smaller: fewer different forms at once, or
# compiled again more often. Larger: hostile forms take more memory at once.
MAX_PROCESSES = 16
MEMORY_MIB = 128  # of a form. A lexer of the most states takes 40 MB
PREPARE_S = 20.0  # a wide limit for the tokens of a tokenizer
COMPILE_S = 5.0  # the longest forms of clients take 50 ms
MASKS_S = 1.0  # of all answers of a form that are due at once; one takes 50 us
# How long the step loop waits for masks after a pass; usually 0.2 ms. The rows of a form whose last
# masks took longer sit out passes instead. Longer: a slow form delays other rows, at first.
WAIT_S = 0.002
NICENESS = 5  # so that tokens of others come first where forms use up the processors
REFUSED_S = 60.0  # how long a form that was refused is refused at once
MAX_REFUSED = 1000
ENDED = "the process of the answer's form was ended"

logger = logging.getLogger(__name__)


class Vocabulary:
    """A tokenizer's tokens and the processes of its forms, shared by its models. Thread-safe.

    Costs nothing before the first form, then a process of 30 MB.
    """

    def __init__(self, table: Table, stop_ids: Iterable[int]) -> None:
        self._table, self._stop_ids = table, sorted(stop_ids)
        self._lock, self._preparing = threading.Lock(), threading.Lock()
        self._prepared: Sandbox | None = None
        self._ended = False  # until the next form
        self._processes: OrderedDict[Form, _FormProcess] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[float, InvalidRequest]] = OrderedDict()
        self.buffers: Buffers = np.empty(len(table), np.float32), np.empty(len(table), np.int32)

    def constrain(self, form: Form, count: int = 1) -> Future[list[Constraint]]:
        """Compile a form and return the constraints of `count` new answers.

        The future raises `InvalidRequest` for a form that cannot be used or takes too much time or
        memory, `Overloaded` if too many forms are in use, and `EngineUnavailable`. If all futures
        of a form are cancelled, compiling ends.
        """
        made: Future[list[Constraint]] = Future()
        if self._table.kind == PROCESS:
            made.set_exception(
                InvalidRequest(
                    f"parameters.{form.kind}: this model's tokenizer cannot be held to a form: its"
                    " texts are not those of its tokens, joined"
                )
            )
            return made
        with self._lock:
            try:
                process = self._process(form)
            except EngineError as error:
                made.set_exception(error)
                return made
            process.num_users += 1  # until `made` is done

        def compiled(first: Future[State]) -> None:
            if not made.set_running_or_notify_cancel():
                return
            try:
                state = first.result()
                made.set_result([Constraint(process, state, self.buffers) for _ in range(count)])
            except BaseException as error:
                made.set_exception(error)

        made.add_done_callback(lambda _: self.release(process))
        process.compiled.add_done_callback(compiled)
        return made

    def _process(self, form: Form) -> _FormProcess:
        """Return the process of a form. Raises `InvalidRequest`, `Overloaded`."""
        process = self._processes.get(form)
        if process is None:
            until, error = self._refused.get(_digest(form), (0.0, None))
            if error is not None and time.monotonic() < until:
                raise InvalidRequest(error.message)
            if len(self._processes) >= MAX_PROCESSES:
                idle = next((p for p in self._processes.values() if not p.num_users), None)
                if idle is None:
                    raise Overloaded(f"{MAX_PROCESSES} other forms are in use")
                self._end(idle)
            self._ended = False
            process = self._processes[form] = _FormProcess(self, form)
        self._processes.move_to_end(form)
        return process

    def acquire(self, process: _FormProcess) -> None:
        with self._lock:
            process.num_users += 1

    def release(self, process: _FormProcess) -> None:
        """End a use of a process. Without any, a form is no longer compiled."""
        with self._lock:
            process.num_users -= 1
            if not process.num_users and not process.compiled.done():
                self._end(process)

    def _end(self, process: _FormProcess) -> None:
        if self._processes.get(process.form) is process:
            del self._processes[process.form]
        process.end()

    def lose(self, process: _FormProcess, error: EngineError) -> None:
        """Forget a process that has failed, and refuse its form for a while if that is why."""
        with self._lock:
            if self._processes.get(process.form) is not process:
                return  # it was ended
            del self._processes[process.form]
            if isinstance(error, InvalidRequest):
                self._refused[_digest(process.form)] = time.monotonic() + REFUSED_S, error
                while len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)

    def fork(self, form: Form) -> Sandbox:
        """Start the process of a form. Raises `Overloaded`, `EngineUnavailable`."""
        what = f"parameters.{form.kind}: the form"
        limits = Limits(MEMORY_MIB, niceness=NICENESS, aborts=True)
        for last in (False, True):
            prepared = self._prepare()
            try:
                target = form_child.serve
                return Sandbox(
                    target, form.kind, form.source, what=what, limits=limits, parent=prepared
                )
            except Overloaded:
                if last or prepared.pid is not None:
                    raise
        raise AssertionError("it was returned or raised")

    def _prepare(self) -> Sandbox:
        with self._preparing:
            if self._prepared is None or self._prepared.pid is None:
                arguments, limits = (self._table.to_json(), self._stop_ids), Limits(forks=True)
                what = "the tokenizer's tokens"
                made = Sandbox(form_child.prepare, *arguments, what=what, limits=limits)
                try:
                    made.ready(PREPARE_S)
                    if self._ended:
                        raise EngineUnavailable(ENDED)
                except BaseException:
                    made.kill()
                    raise
                self._prepared = made
            return self._prepared

    def end(self) -> None:
        """End all processes; answers with a form fail. A later form starts them again."""
        with self._lock:
            self._ended = True
            for process in [*self._processes.values()]:
                self._end(process)
        prepared = self._prepared
        if prepared is not None:
            prepared.kill()


def _digest(form: Form) -> bytes:
    return blake3(json.dumps([form.kind, *form.source]).encode()).digest()


@dataclass(frozen=True)
class State:
    """What may come next in an answer: forced tokens, then those of a mask."""

    forced: list[int]
    mask: NDArray[np.uint32]
    only: int  # the mask's token if it has exactly one; -1 if it has none

    @property
    def address(self) -> int:
        return self.mask.ctypes.data


def state_of(value: Any, count: int) -> State | InvalidRequest:
    """Check a state of `count` tokens, see `FormChild`; returns the error that it has instead.

    Raises `KeyError`, `TypeError`, `ValueError` if it is neither.
    """
    if "error" in value:
        return InvalidRequest(str(value["error"]))
    forced, content = value["forced"], value["mask"]
    if not all(type(token) is int and 0 <= token < count for token in forced):
        raise ValueError("no tokens")
    mask = np.zeros(count // 32 + 1, np.uint32)
    if content:
        mask[:] = np.frombuffer(base64.b64decode(content), np.uint32)
    # `only_allowed` clears the bit of the further end token, which the model does not have.
    return State(list(forced), mask, library.only_allowed(mask.ctypes.data, count))


Task = tuple["Constraint | int", int] | None  # an answer's next token, or one that is over


class _FormProcess:
    """The process of one form, and the thread that waits for it. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, form: Form) -> None:
        self.form, self._vocabulary = form, vocabulary
        self.num_users = 0  # constraints, and requests that wait for one; guarded by `vocabulary`
        self.compiled: Future[State] = Future()  # the first state of each answer
        self.slow = False  # whether the last masks took longer than `WAIT_S`
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._failure: EngineError | None = None
        self._child: Sandbox | None = None
        self._ended = False
        self._over: list[int] = []  # answers that the process can forget
        self._numbers = itertools.count(1)
        threading.Thread(target=self._run, name="form", daemon=True).start()

    def begin(self) -> int:
        """Return the number of a new answer."""
        self._vocabulary.acquire(self)
        return next(self._numbers)

    def advance(self, constraint: Constraint, token: int) -> None:
        """Begin to compute the next state of an answer, which `Constraint.receive` gets."""
        with self._ending:
            if self._failure is None:
                self._tasks.put((constraint, token))
                return
        constraint.receive(self._failure)

    def forget(self, number: int) -> None:
        """End an answer. Takes no lock, so that a finalizer can call it at any time."""
        self._tasks.put((number, 0))

    def end(self) -> None:
        """End the process and the thread; answers fail. Does not block."""
        self._ended = True
        self._tasks.put(None)
        child = self._child
        if child is not None:
            child.kill(ENDED)

    def _run(self) -> None:
        try:
            self.compiled.set_result(again(self._compile))
            while self._work():
                pass
            failure: EngineError = EngineUnavailable(ENDED)
        except EngineError as error:
            failure = error
            if self._ended:
                failure = EngineUnavailable(ENDED)
            elif isinstance(error, ArtifactError):  # of the sandbox: it was late, large, or crashed
                failure = InvalidRequest(error.message)
        except Exception:
            logger.exception("a form's process could not be used")
            failure = EngineError("the form's process could not be used")
        with self._ending:
            self._failure = failure
        if self._child is not None:
            self._child.kill()
        self._vocabulary.lose(self, failure)
        if not self.compiled.done():
            self.compiled.set_exception(failure)
        for task in self._queued():
            if task is not None and isinstance(task[0], Constraint):
                task[0].receive(failure)

    def _compile(self) -> State:
        self._child = child = self._vocabulary.fork(self.form)
        try:
            if self._ended:  # before `end` could know of the child
                raise EngineError(ENDED)
            child.ready(COMPILE_S)
            (first,) = self._states(child.call([(0, None)], [], timeout_s=MASKS_S), 1)
        except BaseException:
            child.kill()
            raise
        if isinstance(first, InvalidRequest):
            raise first
        return first

    def _work(self) -> bool:
        """Do the queued tasks; returns False at the end."""
        tasks = [self._tasks.get(), *self._queued()]
        steps = list[tuple[Constraint, int]]()
        for task in tasks:
            if task is None:
                continue
            answer, token = task
            if isinstance(answer, Constraint):
                steps.append((answer, token))
            else:
                self._over.append(answer)
                self._vocabulary.release(self)
        try:
            if None in tasks:
                return False
            if steps:
                assert self._child is not None
                began = time.monotonic()
                wanted = [(constraint.number, token) for constraint, token in steps]
                values = self._child.call(wanted, self._over, timeout_s=MASKS_S)
                states = self._states(values, len(steps))
                self._over = []
                self.slow = time.monotonic() - began > WAIT_S
                while steps:
                    steps.pop()[0].receive(states.pop())
            return True
        finally:
            for step in steps:  # they fail with the process
                self._tasks.put(step)

    def _queued(self) -> list[Task]:
        tasks = list[Task]()
        with contextlib.suppress(queue.Empty):
            while True:
                tasks.append(self._tasks.get_nowait())
        return tasks

    def _states(self, values: Any, count: int) -> list[State | InvalidRequest]:
        """Check the states that the process returned: nothing that it sends is trusted."""
        try:
            if len(values) != count:
                raise ValueError("too few")
            return [state_of(value, len(self._vocabulary.buffers[0])) for value in values]
        except (TypeError, KeyError, ValueError):
            reason = f"parameters.{self.form.kind}: the form's process gave no masks"
            raise InvalidRequest(reason) from None


class Constraint:
    """The tokens that may come next in one answer with a form.

    `advance` begins to compute the next ones; everything else needs `ready`. To be closed.
    """

    def __init__(self, process: _FormProcess, first: State, buffers: Buffers) -> None:
        self._process, self.number, self._buffers = process, process.begin(), buffers
        self._arrived, self._closed = threading.Event(), False
        self.receive(first)

    def close(self) -> None:
        """End the answer in the form's process. Does not block."""
        if not self._closed:
            self._closed = True
            self._process.forget(self.number)

    __del__ = close  # of an answer that was not begun

    def receive(self, state: State | EngineError) -> None:
        """Set the next state, or the error of an answer that cannot go on."""
        self._state = state
        self._forced = deque(() if isinstance(state, EngineError) else state.forced)
        self._arrived.set()

    @property
    def ready(self) -> bool:
        return self._arrived.is_set()

    @property
    def slow(self) -> bool:
        """Whether the form's last masks took longer than `WAIT_S`."""
        return self._process.slow

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is ready; returns whether it is."""
        return self._arrived.wait(timeout_s)

    def check(self) -> None:
        """Raise `InvalidRequest` if the form cannot go on, or the error that ended its process."""
        if isinstance(self._state, EngineError):
            raise self._state

    @property
    def _next(self) -> State:
        self.check()
        assert isinstance(self._state, State)
        return self._state

    @property
    def complete(self) -> bool:
        """Whether the answer can only end here."""
        return not self._forced and self._next.only == -1

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None if there is not exactly one."""
        if self._forced:
            return self._forced[0]
        return self._next.only if self._next.only >= 0 else None

    def likeliest(self, logits: Logits) -> int:
        """The token with the largest of `logits` (V,) among those that may come next."""
        if self.forced is not None:
            return self.forced
        logits = np.ascontiguousarray(logits)
        count = len(self._buffers[0])
        return int(library.allowed_argmax(logits.ctypes.data, self._next.address, count))

    def allowed(self, logits: Logits) -> tuple[Logits, NDArray[np.int32]]:
        """The logits of tokens that may come next, and the tokens; valid until the next call."""
        if self.forced is not None:
            return logits[[self.forced]], np.array([self.forced], np.int32)
        logits = np.ascontiguousarray(logits)
        (values, tokens), address = self._buffers, self._next.address
        data = values.ctypes.data, tokens.ctypes.data
        count = library.allowed_logits(logits.ctypes.data, address, len(values), *data)
        return values[:count], tokens[:count]

    def advance(self, token: int) -> None:
        """Advance by an allowed token. It is not ready then, unless the token was forced."""
        if self._forced:
            self._forced.popleft()
            return
        self._arrived.clear()
        self._process.advance(self, token)
