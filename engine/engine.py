"""The engine: holds all models, and makes their tokens on one thread, turn by turn."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine import backends, gpu
from engine.artifacts import open_artifact
from engine.errors import (
    EngineError,
    InvalidRequest,
    ModelAlreadyLoaded,
    ModelNotFound,
    Overloaded,
)
from engine.histogram import Histogram
from engine.memory import MIB, Budget, return_freed_memory
from engine.parameters import Parameters
from engine.prompts import Inputs, Prompts
from engine.prune import prune
from engine.scheduler import Batch
from engine.sequence import Sequence, State, Token
from engine.settings import Settings

IDLE_S = 0.005
# Giving a row's memory back takes as long and keeps the interpreter's lock: answers go out before.
ANSWER_FIRST_S = 0.0005
GPU_LOST = 75  # exit status

logger = logging.getLogger(__name__)


@dataclass
class Statistics:
    """Counters of one model since it was loaded."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: int = 0  # summed over steps: rows / steps is the mean batch size
    queue_s: Histogram = field(default_factory=Histogram)  # until its prompt is begun
    time_to_first_token_s: Histogram = field(default_factory=Histogram)
    seconds_per_request: float = 0.0  # moving average


@dataclass
class Model:
    """A loaded model: its weights on a backend, its way with text, its batch."""

    name: str
    path: Path
    backend: str
    precision: str
    compute: backends.BackendModel
    prompts: Prompts
    batch: Batch
    reserved_bytes: int
    load_s: float
    statistics: Statistics = field(default_factory=Statistics)

    def describe(self) -> dict[str, Any]:
        config, counters = self.compute.config, self.statistics
        return {
            "name": self.name,
            "model_dir": str(self.path),
            "backend": self.backend,
            "precision": self.precision,
            "parameters": config.num_parameters,
            "max_length": config.max_length,
            "weight_bytes": self.compute.weight_bytes,
            "kv_bytes": self.compute.kv_bytes,
            "load_seconds": round(self.load_s, 3),
            "running": len(self.batch.rows),
            "waiting": len(self.batch.waiting),
            **vars(counters),
            "queue_s": counters.queue_s.describe(),
            "time_to_first_token_s": counters.time_to_first_token_s.describe(),
        }


def _fail(sequences: list[Sequence], error: EngineError) -> None:
    """Tells each; one that cannot be told (its client's event loop has gone) keeps no other."""
    for sequence in sequences:
        try:
            sequence.fail(error)
        except Exception:
            logger.exception("a request could not be told that it failed")


class Engine:
    """Thread-safe. `close` ends the thread and frees every model."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.budget = Budget(self.settings.budget_bytes)
        self._models: dict[str, Model] = {}
        self._loading: dict[str, Future[Model]] = {}
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Models

    def load(
        self, name: str, model_dir: str, backend: str | None = None, precision: str | None = None
    ) -> Model:
        """Loads the model in `model_dir`. Of several loads of one name at once, one does the work.

        Raises `ArtifactError`, `OutOfMemory`, `InvalidRequest`; `ModelAlreadyLoaded` if the name
        stands for another folder, backend or precision. A failed load leaves nothing behind.
        """
        backend, precision = self._resolve(backend, precision)
        wanted = (Path(model_dir).resolve(), backend, precision)
        with self._changed:
            future = self._loading.get(name)
            mine = future is None
            if name in self._models:
                return self._same(self._models[name], wanted)
            if future is None:
                future = self._loading[name] = Future()
        if not mine:
            return self._same(future.result(), wanted)
        try:
            model = self._load(name, *wanted)
        except BaseException as error:
            with self._changed:
                del self._loading[name]
            future.set_exception(error)
            raise
        with self._changed:
            self._models[name] = model
            del self._loading[name]
        future.set_result(model)
        logger.info("loaded %s from %s in %.2f s", name, model.path, model.load_s)
        return model

    def check(
        self, name: str, model_dir: str, backend: str | None = None, precision: str | None = None
    ) -> int:
        """What the weights of the model in `model_dir` will take, in bytes, if there is room now.

        Reads nothing but the artifact's index. Raises what `load` would for want of room or for an
        artifact that is none.
        """
        config = open_artifact(model_dir).config
        needed = backends.weight_bytes(config, *self._resolve(backend, precision))
        self.budget.check_weights(needed, name)
        return needed

    def _resolve(self, backend: str | None, precision: str | None) -> tuple[str, str]:
        """With the defaults for what is not given. Raises `InvalidRequest`."""
        backend = backend or self.settings.backend
        if backend not in backends.BACKENDS:
            raise InvalidRequest(
                f"backend is {backend!r}, must be one of {', '.join(backends.BACKENDS)}"
            )
        default = self.settings.precision if backend == self.settings.backend else ""
        known = backends.precisions(backend, self.settings.device)
        return backend, precision or default or known[0]

    @staticmethod
    def _same(model: Model, wanted: tuple[Path, str, str]) -> Model:
        if (model.path, model.backend, model.precision) != wanted:
            raise ModelAlreadyLoaded(
                f"{model.name} is loaded already, from {model.path}"
                f" ({model.backend}, {model.precision}); unload it first"
            )
        return model

    def _load(self, name: str, path: Path, backend: str, precision: str) -> Model:
        started = time.monotonic()
        artifact = open_artifact(path)
        prompts = Prompts(artifact)
        needed = backends.weight_bytes(artifact.config, backend, precision)
        self.budget.reserve_weights(needed, name)
        try:
            cache_dir = Path(self.settings.cache_dir) if self.settings.cache_dir else None
            device = self.settings.device
            compute = backends.load(
                artifact, backend, precision, device=device, cache_dir=cache_dir
            )
            if cache_dir is not None:
                prune(cache_dir, self.settings.cache_max_mib * MIB)
        except BaseException:
            self.budget.release_weights(needed)
            return_freed_memory()
            raise
        batch = Batch(compute, self.settings.max_rows, self.budget)
        took = time.monotonic() - started
        return Model(name, path, backend, precision, compute, prompts, batch, needed, took)

    def unload(self, name: str) -> None:
        """Frees a model and gives its memory back; its running requests fail with 404.

        Raises `ModelNotFound`.
        """
        with self._changed:
            model = self._find(name)
            del self._models[name]
        self._on_thread(lambda: self._free(model))
        logger.info("unloaded %s", name)

    def _free(self, model: Model) -> None:
        _fail(model.batch.clear(), ModelNotFound(f"{model.name} was unloaded"))
        model.compute.close()
        self.budget.release_weights(model.reserved_bytes)
        return_freed_memory()

    def _find(self, name: str) -> Model:
        if name not in self._models:
            raise ModelNotFound(f"model {name} is not loaded")
        return self._models[name]

    def models(self) -> list[dict[str, Any]]:
        return [model.describe() for model in list(self._models.values())]

    def statistics(self) -> dict[str, Any]:
        return {
            "budget_bytes": self.budget.total_bytes,
            "weight_bytes": self.budget.weight_bytes,
            "kv_bytes": self.budget.kv_bytes,
            "pid": os.getpid(),
            "models": self.models(),
        }

    # Requests

    def parameters(self, name: str, given: Any) -> Parameters:
        """A request's parameters over the model's own. Raises `ModelNotFound`, `InvalidRequest`."""
        return self._find(name).prompts.parameters(given)

    def submit(
        self,
        name: str,
        inputs: Inputs,
        parameters: Parameters,
        emit: Callable[[Token | EngineError], None],
        timeout_s: float | None = None,
    ) -> list[Sequence]:
        """Queues a prompt: a text, or the fields of the model's template.

        `emit` is called on the engine's thread and must not block.

        Raises `ModelNotFound`, `InvalidRequest`, `PromptTooLong`, `Overloaded`.
        """
        model = self._find(name)
        longest = model.compute.config.max_length
        ids = model.prompts.encode(inputs)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        sequences = [
            Sequence(
                prompt=ids,
                parameters=parameters,
                max_length=longest,
                stop_ids=model.prompts.stop_ids,
                detokenizer=model.prompts.detokenizer(ids),
                emit=emit,
                index=i,
                strip=model.prompts.strip,
                deadline=deadline,
            )
            for i in range(parameters.num_return_sequences)
        ]
        with self._changed:
            if self._closed or self._models.get(name) is not model:
                raise ModelNotFound(f"model {name} is not loaded")
            waiting = len(model.batch.waiting)
            if len(sequences) > self.settings.max_queue:
                raise InvalidRequest(
                    "parameters.num_return_sequences is above the queue's length,"
                    f" {self.settings.max_queue}"
                )
            if waiting + len(sequences) > self.settings.max_queue:
                pace = model.statistics.seconds_per_request / model.batch.max_rows
                raise Overloaded(
                    f"{waiting} requests wait for {name} already",
                    retry_after_s=max(1.0, round(waiting * pace)),
                )
            model.statistics.requests += 1
            model.statistics.prompt_tokens += len(ids)
            model.batch.waiting.extend(sequences)
            self._changed.notify_all()
        return sequences

    def cancel(self, sequences: list[Sequence]) -> None:
        """Frees the places of a request whose client has gone, at the next step."""
        for sequence in sequences:
            sequence.cancelled = True

    # The thread

    def _on_thread(self, command: Callable[[], None]) -> None:
        """Runs `command` between two turns and waits for it."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                command()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        with self._changed:
            self._commands.append(run)
            self._changed.notify_all()
        done.result()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._commands or self._busy())
                if self._closed and not self._commands:
                    return
                commands, self._commands = self._commands, deque()
                busy = self._busy()
            for command in commands:
                command()
            # In turn: no model gets two turns while another waits for one.
            turns = [self._turn(m) for m in busy if self._models.get(m.name) is m]
            if turns and not any(turns):  # all wait for memory that another thread holds
                time.sleep(IDLE_S)

    def _busy(self) -> list[Model]:
        return [model for model in self._models.values() if model.batch.has_work]

    def _turn(self, model: Model) -> bool:
        """One step of one model. Says whether there was anything to do."""
        try:
            return self._step(model)
        except Exception as error:
            logger.exception("a step of %s failed", model.name)
            if gpu.is_fatal(str(error)):  # no later step can work: the supervisor starts anew
                os._exit(GPU_LOST)
            known = isinstance(error, EngineError)
            failure = error if known else EngineError(f"a step of {model.name} failed")
            assert isinstance(failure, EngineError)
            _fail(model.batch.clear(), failure)
            return True

    def _step(self, model: Model) -> bool:
        """Schedule, run, postprocess."""
        batch, compute, counters = model.batch, model.compute, model.statistics
        with self._changed:  # the queue is shared with `submit`
            chunks = batch.schedule()
        for chunk in chunks:
            if compute.length(chunk.row) == 0:
                counters.queue_s.observe(time.monotonic() - batch.rows[chunk.row].queued_at)
            logits = compute.extend(chunk.row, np.array(chunk.ids))
            if chunk.completes:
                sequence = batch.rows[chunk.row]
                sequence.state = State.DECODE
                waited_s = time.monotonic() - sequence.queued_at
                counters.time_to_first_token_s.observe(waited_s)
                sequence.advance(logits)
                self._count(model, [sequence])
        batch.collect()
        running = batch.running()
        if running:
            rows = compute.decode(np.array([sequence.ids[-1] for sequence in running]))
            for sequence, logits in zip(running, rows, strict=True):
                sequence.advance(logits)
            counters.steps += 1
            counters.rows += len(running)
            self._count(model, running)
            if any(sequence.state is State.FINISHED for sequence in running):
                time.sleep(ANSWER_FIRST_S)
            batch.collect()
        return bool(chunks or running)

    @staticmethod
    def _count(model: Model, advanced: list[Sequence]) -> None:
        counters = model.statistics
        counters.tokens += len(advanced)
        for sequence in advanced:
            if sequence.state is State.FINISHED:
                took = time.monotonic() - sequence.queued_at
                counters.seconds_per_request += (took - counters.seconds_per_request) / 8

    def close(self) -> None:
        for name in list(self._models):
            self.unload(name)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
