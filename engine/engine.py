"""The engine: loads and unloads models, and queues their requests."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import Any, TypeVar

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelAlreadyLoaded,
    ModelNotFound,
    Overloaded,
)
from common.memory import MIB, container_memory
from common.parameters import Parameters
from engine.backends.interface import Adapter, WeightsLost
from engine.budget import Budget
from engine.classification import Classification, Outputs, without_padding
from engine.contents import Request
from engine.cores import Cores
from engine.futures import after, completed
from engine.generation import FormGeneration, Generation, TextSequence, Token
from engine.guesses import Guesser
from engine.labels import Choice, Labels, check_lengths
from engine.loader import Loader
from engine.model import Core, Model
from engine.native.model import release_memory
from engine.prefixes import Prefixes
from engine.residency import Residency
from engine.rules import Rule
from engine.sandbox.reading import Reading
from engine.sequence import Sequence
from engine.settings import Settings
from engine.step_loop import Loop
from engine.text.constraint import Constraint
from engine.text.prompts import Inputs, check_bytes
from engine.text.texts import Texts

# Memory of the container that the prefix cache does not take, so that two workers can start
# (`serving.models.worker_memory`). Smaller: a starting worker may be killed for want of memory.
RESERVE_BYTES = 128 * MIB

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Engine:
    """All loaded models and their step loop. Thread-safe.

    Messages of errors do not name the model: its name here is the gateway's, for one load.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.budget = Budget(self.settings.budget_bytes, self.settings.overcommit)
        self._models: dict[str, Model] = {}
        self._loading: dict[str, Future[Model]] = {}
        self._unloading: dict[str, threading.Event] = {}  # set once the memory is free
        self._changed = threading.Condition()  # guards models, residency and queues
        limit = self.settings.prefix_cache_mib * MIB
        self._prefixes = Prefixes(limit, lambda: self.budget.free_bytes, _container_shortage_bytes)
        self.budget.on_growth = self._prefixes.shrink
        self._cores = Cores(self._changed)
        self._residency = Residency(self._changed, self._cores.by_name, self.budget, self._prefixes)
        self._loader = Loader(
            self.settings, self.budget, self._prefixes, self._residency, self._cores
        )
        idle = release_memory if self.settings.device == "cpu" else lambda: None
        self._loop = Loop(self._changed, self._lose, self._residency.open_waiting, idle)
        self._closed = False

    # Models

    def load(
        self,
        name: str,
        model_dir: str,
        backend: str | None = None,
        precision: str | None = None,
        max_rows: int | None = None,
        reading: Reading | None = None,
        base: str | None = None,
    ) -> Model:
        """Load the model in `model_dir`, or the adapter there for the base model in `base`.

        If several threads load one name at once, one does the work. A base and its adapters share
        weights and steps. At most `max_rows` sequences share a step, by default ENGINE_MAX_ROWS.

        `reading` can cancel the load; another load of the name then takes over. Raises
        `ArtifactError`, `OutOfMemory`, `InvalidRequest`, `Cancelled`, and `ModelAlreadyLoaded` if
        the name has another folder, backend or precision. A failed load leaves nothing behind.
        """
        wanted = self._loader.request(name, model_dir, backend, precision, max_rows, base)
        reading = reading or Reading()
        while True:
            reading.check()
            with self._changed:
                future = self._loading.get(name)
                if name in self._models:
                    return self._same(self._models[name], wanted)
                if future is None:
                    future = self._loading[name] = Future()
                    break
            try:
                return self._same(future.result(), wanted)
            except Cancelled:
                continue  # the load that did the work was cancelled
        try:
            model = self._loader.load(wanted, reading, self._discard)
        except BaseException as error:
            with self._changed:
                del self._loading[name]
            future.set_exception(error)
            raise
        with self._changed:
            del self._loading[name]
            lost = model.core.lost
            if not lost:
                self._models[name] = model
        if lost:
            fault = EngineError("a step failed while the model was loaded")
            try:
                self._discard(model, fault)
            finally:
                future.set_exception(fault)
            raise fault
        future.set_result(model)
        logger.info("loaded %s from %s in %.2f s", name, model.path, model.load_s)
        return model

    def check(
        self,
        name: str,
        model_dir: str,
        backend: str | None = None,
        precision: str | None = None,
        reading: Reading | None = None,
        promised: Mapping[str, int] | None = None,
        base: str | None = None,
    ) -> int:
        """Return the bytes of a model's weights if it can be loaded now.

        `promised` has the bytes of models that will be loaded, by name. A later load does not
        read the files again. Raises what `load` raises for a lack of memory or a faulty artifact.
        """
        wanted = self._loader.request(name, model_dir, backend, precision, None, base)
        needed, row = self._loader.needs(wanted, reading or Reading())
        self.budget.check(needed, row, name, promised)
        return needed

    @staticmethod
    def _same(model: Model, wanted: Request) -> Model:
        core = model.core
        loaded = (model.path, model.base, core.backend, core.precision)
        if loaded != (wanted.path, wanted.base, wanted.backend, wanted.precision):
            raise ModelAlreadyLoaded(
                f"a model of this name is loaded already, from {model.path}"
                f" ({core.backend}, {core.precision}); unload it first"
            )
        return model

    def unload(self, name: str, unless: Callable[[Model], bool] = lambda _: False) -> bool:
        """Unload a model and free its memory; its running requests fail with 404.

        `unless` is called with the model while no request can be queued; if it returns True, the
        model is not unloaded. Returns whether it was unloaded. Raises `ModelNotFound`; if another
        thread is unloading the model, only after the memory is free.
        """
        with self._changed:
            freed = self._unloading.get(name) if name not in self._models else None
            if freed is None:
                model = self._find(name)
                if unless(model):
                    return False
                del self._models[name]
                last = self._cores.remove(model)
                done = self._unloading[name] = threading.Event()
        if freed is not None:
            freed.wait()
            raise ModelNotFound("the model is not loaded")
        try:
            self._free_between_turns(model, last, ModelNotFound("the model was unloaded"))
        finally:
            with self._changed:
                if self._unloading.get(name) is done:
                    del self._unloading[name]
            done.set()
        logger.info("unloaded %s", name)
        return True

    def _lose(self, core: Core, error: Exception) -> None:
        """Unload all models of a core whose pass failed as a whole, or those of lost adapters."""
        reason = EngineError("a step of the model failed")
        adapters: Collection[Adapter] = ()
        if isinstance(error, WeightsLost):
            reason = EngineUnavailable(f"{error}; the model is loaded again")
            adapters = error.adapters
        with self._changed:
            if not adapters:
                core.lost = True
                self._cores.forget(core)
            # A model that another thread is loading or unloading is freed by that thread.
            lost = [
                model
                for model in core.models
                if (not adapters or model.adapter in adapters)
                and self._models.get(model.name) is model
            ]
            for model in lost:
                del self._models[model.name]
            last = {model: self._cores.remove(model) for model in lost}
        for model in lost:
            try:
                self._free(model, last[model], reason)
            except Exception:
                logger.exception("%s could not be freed", model.name)

    def _discard(self, model: Model, reason: EngineError) -> None:
        """Free a model that was opened, but whose load has failed."""
        self._free_between_turns(model, self._cores.remove(model), reason)

    def _free_between_turns(self, model: Model, last: bool, reason: EngineError) -> None:
        """Free a model that was removed from its core, while no step is computed."""
        if last:
            self._residency.dequeue(model.core)
        self._loop.call(lambda: self._free(model, last, reason))

    def _free(self, model: Model, last: bool, reason: EngineError) -> None:
        with contextlib.ExitStack() as steps:  # each is done even if another raises
            steps.callback(self._loader.free, model, last, reason)
            with self._changed:
                model.batch.end(reason, None if last else model)

    def _find(self, name: str) -> Model:
        if name not in self._models:
            raise ModelNotFound("the model is not loaded")
        return self._models[name]

    def _generator(self, name: str) -> Model:
        model = self._find(name)
        if model.head is not None:
            raise InvalidRequest(
                "this model is a classifier, which generates no text: POST /invocations or"
                ' /predictions/NAME with {"inputs": text, or a list of texts}'
            )
        return model

    def describe(self, model: Model) -> dict[str, Any]:
        """Status and counters of a model. Raises `ModelNotFound` if it was unloaded meanwhile."""
        with self._changed:
            if self._models.get(model.name) is not model:
                raise ModelNotFound("the model is not loaded")
            return model.describe()

    def models(self) -> list[dict[str, Any]]:
        with self._changed:  # so that no model is freed meanwhile
            return [model.describe() for model in self._models.values()]

    def held(self) -> list[dict[str, Any]]:
        with self._changed:
            return [model.held() for model in self._models.values()]

    def statistics(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget.total_bytes,
            "weight_bytes": self.budget.weight_bytes,
            "kv_bytes": self.budget.kv_bytes,
            "prefix_bytes": self._prefixes.num_bytes,
            "opened": self._residency.opened,
            "longest_step_s": self._loop.longest_step_s,
            "pid": os.getpid(),
            "models": self.models(),
        }

    # Requests

    def check_bytes(self, name: str, length: int) -> None:
        """Check the length of a request's body. Raises `ModelNotFound`, `PromptTooLong`."""
        check_bytes(length, self._find(name).config.max_length)

    def parameters(self, name: str, given: Any) -> Parameters:
        """Parse parameters, with the model's defaults. Raises `ModelNotFound`, `InvalidRequest`."""
        return self._generator(name).texts.parameters(given)

    def with_texts(self, name: str, task: Callable[[Texts], Result]) -> Future[Result]:
        """Run `task` on the model's text thread. Raises `ModelNotFound`, `Overloaded`."""
        texts = self._find(name).texts
        return texts.soon(lambda: task(texts))

    def submit(
        self,
        name: str,
        inputs: Inputs,
        parameters: Parameters,
        emit: Callable[[Token | EngineError], None],
        timeout_s: float | None = None,
        stream: bool = True,
    ) -> Future[list[TextSequence]]:
        """Tokenize a prompt in the model's text process, then queue the sequences of its answers.

        The form is compiled meanwhile. If the future is cancelled, this work ends.

        `emit` is called with each token on a text thread, or with an error on any thread; it must
        not block. Without `stream`, tokens are emitted several at a time.

        Raises `ModelNotFound`, `Overloaded`; the future raises those, `DeadlineExceeded`,
        `InvalidRequest`, `PromptTooLong`, and what `Texts.encode` does.
        """
        model, received_at = self._generator(name), time.monotonic()
        deadline = None if timeout_s is None else received_at + timeout_s
        form, count = parameters.form, parameters.num_return_sequences
        scored = parameters.choice_logprobs

        def tokenize() -> tuple[list[int], Labels | None, list[Rule]]:
            _begin_texts(model, deadline, timeout_s)
            ids = model.texts.encode(inputs)
            labels = model.texts.labels(form) if form is not None and scored else None
            if labels is not None:
                check_lengths(labels, len(ids), model.config.max_length)
            # The prompt is indexed once for all answers.
            return ids, labels, model.texts.rules(parameters, ids)

        def queue(
            tokenized: tuple[list[int], Labels | None, list[Rule]],
            constraints: Seq[Constraint | None],
        ) -> list[TextSequence]:
            ids, labels, rules = tokenized
            speculates = self.settings.speculation == "auto"

            def sequence(index: int, constraint: Constraint | None) -> TextSequence:
                shared: dict[str, Any] = {
                    "prompt": ids,
                    "parameters": parameters,
                    "max_length": model.config.max_length,
                    "stop_ids": model.texts.stop_ids,
                    "emit": emit,
                    "index": index,
                    "eager": stream,
                    "deadline": deadline,
                    "model": model,
                    "adapter": model.adapter,
                    "rules": list(map(copy.copy, rules)),
                    "received_at": received_at,
                }
                if labels is not None:
                    return Choice(labels=labels, **shared)
                guesser = Guesser(model.recent) if speculates else None
                if constraint is not None:
                    return FormGeneration(constraint=constraint, guesser=guesser, **shared)
                return Generation(guesser=guesser, **shared)

            sequences = list(map(sequence, range(count), constraints))
            self._queue(model, sequences)
            return sequences

        def begin() -> Future[list[TextSequence]]:
            tokenizing = model.texts.soon(tokenize)
            forming: Future[Any] = completed([None] * count)
            if form is not None and not scored:
                forming = model.texts.constrain(form, count)
            return after(
                [tokenizing, forming],
                lambda: queue(tokenizing.result(), forming.result()),
                ModelNotFound("the model was unloaded"),
            )

        return self._submit(model, begin)

    def classify(
        self,
        name: str,
        texts: Seq[Seq[str]],
        emit: Callable[[Outputs | EngineError], None],
        timeout_s: float | None = None,
        *,
        first: int | None = None,
        truncate: bool = False,
    ) -> Future[list[Classification]]:
        """Tokenize texts, or pairs of texts, for a classifier, then queue a sequence of each.

        `emit` is called with the `Outputs` of each text, or with an error, on any thread. Raises as
        `submit`, and `InvalidRequest` for a model that generates text.

        first: see `Texts.encode_texts`, as `truncate`
        """
        model, received_at = self._find(name), time.monotonic()
        deadline = None if timeout_s is None else received_at + timeout_s
        if (head := model.head) is None:
            raise InvalidRequest("this model generates text, and is no classifier")
        of_tokens, pad_id = head.classifier.of_tokens, head.classifier.pad_id

        def work() -> list[Classification]:
            _begin_texts(model, deadline, timeout_s)
            encoded = model.texts.encode_texts(texts, first, truncate, of_tokens)
            sequences = [
                Classification(
                    prompt=text.ids if of_tokens else without_padding(text.ids, pad_id),
                    max_length=model.config.max_length,
                    emit=emit,
                    index=i,
                    deadline=deadline,
                    model=model,
                    adapter=model.adapter,
                    head=head,
                    encoded=text,
                    received_at=received_at,
                )
                for i, text in enumerate(encoded)
            ]
            self._queue(model, sequences, is_new=not first)
            return sequences

        return self._submit(model, lambda: model.texts.soon(work))

    def _submit(self, model: Model, begin: Callable[[], Future[Result]]) -> Future[Result]:
        """Keep a model's core resident until the future that `begin` returns is done."""
        with self._changed:
            model.submitting += 1
            self._residency.used(model)
        try:
            submitted = begin()
        except BaseException:
            self._release(model)
            raise
        submitted.add_done_callback(lambda _: self._release(model))
        return submitted

    def _release(self, model: Model) -> None:
        with self._changed:
            model.submitting -= 1
            self._residency.open_waiting()

    def _queue(self, model: Model, sequences: Seq[Sequence], is_new: bool = True) -> None:
        """Queue sequences of a request, which counts as another one if it `is_new`."""
        with self._changed:
            self._loop.check()
            if self._closed or self._models.get(model.name) is not model:
                raise ModelNotFound("the model is not loaded")
            waiting = model.batch.num_waiting(model)
            if len(sequences) > self.settings.max_queue:
                raise InvalidRequest(
                    f"the request has {len(sequences)} answers, more than the queue's length,"
                    f" {self.settings.max_queue}: lower parameters.num_return_sequences"
                )
            if waiting + len(sequences) > self.settings.max_queue:
                pace = model.statistics.seconds_per_request / model.batch.row_limit
                raise Overloaded(
                    f"{waiting} requests wait for this model already",
                    retry_after_s=max(1.0, round(waiting * pace)),
                )
            model.statistics.requests += is_new
            prompts = {id(sequence.prompt): len(sequence.prompt) for sequence in sequences}
            model.statistics.prompt_tokens += sum(prompts.values())
            model.batch.waiting.extend(sequences)
            self._residency.request(model.core)
            self._loop.add(model.core)

    def cancel(self, sequences: Seq[Sequence]) -> None:
        """Cancel the sequences of a request; the next step frees their rows."""
        for sequence in sequences:
            sequence.cancelled = True

    def health(self) -> dict[str, Any]:
        """The health of the step loop, see `Loop.health`."""
        return self._loop.health()

    def close(self) -> None:
        with self._changed:
            self._closed = True
        for name in list(self._models):
            with contextlib.suppress(ModelNotFound):  # another thread has unloaded it
                self.unload(name)
        self._loop.close()
        self._residency.close()
        self._loader.close()


def _begin_texts(model: Model, deadline: float | None, timeout_s: float | None) -> None:
    """Check the deadline, and read the adapter in, before a request's texts are tokenized."""
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineExceeded(f"the request waited for its timeout, {timeout_s:.1f} s")
    if model.adapter is not None:  # so that no step waits for the disk
        with contextlib.suppress(OSError):  # a file that cannot be read is lost in the next pass
            model.adapter.read_in()


def _container_shortage_bytes() -> int:
    """Return the bytes that the container lacks to start workers; 0 or less if it has enough."""
    container = container_memory()
    return 0 if container is None else RESERVE_BYTES - container.free_bytes
