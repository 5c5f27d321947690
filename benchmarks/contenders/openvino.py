"""Contender: OpenVINO GenAI's continuous batching on int8 weights. Runs in its own environment.

The model is what `optimum-cli export openvino --weight-format int8` makes, which NNCF quantizes:
uint8, asymmetric, a scale for each row. By default it computes in bfloat16 where the processor can,
and stores keys and values in int8. The scheduler has its defaults, too, except that its prefix
cache is on for `uses`, as in OpenVINO's `LLMPipeline` and server. Where speeds are compared,
prompts repeat, and no contender caches them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.logits import logits_command
from benchmarks.engine.uses import SAMPLED, measurement
from benchmarks.worker import Clock, Started, generation

EOS = 3  # ends no answer, as `ignore_eos` is set


class OpenRequest:
    """A request in flight; `poll` is called after each step of the pipeline."""

    def __init__(self, handle: Any) -> None:
        self.ids: list[int] = []
        self.tokens, self.first_s, self.all_begun_s = 0, 0.0, 0.0
        self.done = threading.Event()
        self._handle, self._began = handle, time.perf_counter()

    def poll(self) -> None:
        """Read new tokens. A single answer is streamed; several come together at their end."""
        now = time.perf_counter() - self._began
        while self._handle.can_read():
            results = [out.generated_ids for out in self._handle.read().values()]
            self.tokens += sum(map(len, results))
            self.ids += results[0]
        if self.tokens:
            self.first_s = self.first_s or now
            self.all_begun_s = self.all_begun_s or now
        if self._handle.get_status().name != "RUNNING":
            self.done.set()


class Pipeline:
    def __init__(self, folder: str, threads: int, keeps: bool) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = keeps
        how = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        self._folder, self._how = folder, how
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", how)
        self._numbers = itertools.count()
        self._requests: list[OpenRequest] = []
        self._more = threading.Condition()

    def add(self, ids: list[int], new_tokens: int, sampled: bool = False, answers: int = 1) -> Any:
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.eos_token_id, config.ignore_eos = new_tokens, EOS, True
        config.num_return_sequences = answers
        if sampled:
            config.do_sample = True
            for name, value in SAMPLED.items():
                setattr(config, name, value)
        tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
        return self.pipeline.add_request(next(self._numbers), tensor, config)

    def ask(
        self, ids: list[int], new_tokens: int, sampled: bool = False, answers: int = 1
    ) -> OpenRequest:
        with self._more:
            request = OpenRequest(self.add(ids, new_tokens, sampled, answers))
            self._requests.append(request)
            self._more.notify()
        request.done.wait()
        return request

    def run(self) -> None:
        """Run steps, forever; wait while there are no requests of `ask`."""
        while True:
            with self._more:
                self._more.wait_for(lambda: self._requests)
            self.pipeline.step()
            with self._more:
                for request in self._requests:
                    request.poll()
                self._requests = [each for each in self._requests if not each.done.is_set()]

    @cached_property
    def _model(self) -> Any:
        """The model alone, with the pipeline's properties: the pipeline returns no logits."""
        import openvino

        file = Path(self._folder) / "openvino_model.xml"
        return openvino.Core().compile_model(file, "CPU", self._how).create_infer_request()

    def logits_after(self, ids: Sequence[int], count: int) -> Any:
        """Return the logits (count, V) after each of the last `count` ids.

        These come one by one, as in a generation: keys and values are in int8 only from the next
        call on.
        """
        self._model.reset_state()
        begin = len(ids) - count + 1
        rows = [self._append(ids[:begin], 0)]
        rows += (self._append(ids[at : at + 1], at) for at in range(begin, len(ids)))
        return np.stack(rows)

    def _append(self, ids: Sequence[int], position: int) -> Any:
        """Return the logits (V,) after the last id."""
        given = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, position + len(ids)), dtype=np.int64),
            "position_ids": np.arange(position, position + len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        return self._model.infer(given)["logits"][0, -1].copy()  # of (1, T, V)

    def generate(self, prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        handles = [self.add(prompt, new_tokens) for prompt in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            clock.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]


def start(folder: str, threads: str, *keeps: str) -> Started:
    pipeline = Pipeline(folder, int(threads), bool(keeps))
    threading.Thread(target=pipeline.run, daemon=True).start()
    about = {
        "version": f"openvino-genai {metadata.version('openvino-genai')}",
        "weight_bytes": (Path(folder) / "openvino_model.bin").stat().st_size,
    }
    commands = {
        "generate": generation(pipeline.generate),
        "measure": measurement(pipeline.ask),
        "logits": logits_command(pipeline.logits_after),
    }
    return about, commands
