"""Clients that ask many models by streams, one after the other each, and what they saw."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from benchmarks.process import BenchmarkError
from benchmarks.switching.servers import LlamaStreams, Ours

ANSWER_S = 120.0
STATES = ("hot", "warm", "parked", "cold")
HEADERS = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}


@dataclass(frozen=True)
class Answered:
    """A request and its answer. `state` is what the model was just before; `hot`, how many were."""

    model: str
    prompt: int
    state: str
    hot: int
    began_s: float
    first_s: float  # since `began_s`
    seconds: float
    tokens: int
    text: str
    error: str = ""

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "text"}


class Client:
    """One connection that stays open."""

    def __init__(
        self,
        server: Ours | LlamaStreams,
        prompts: Sequence[list[int]],
        new_tokens: int,
        watches: bool = True,
    ) -> None:
        """`watches`: query the models' residency before each call, which is slow with hundreds."""
        self._watches = watches
        self._server, self._prompts, self._new_tokens = server, prompts, new_tokens
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)

    def ask(self, model: str, prompt: int = 0, new_tokens: int | None = None) -> Answered:
        new_tokens = new_tokens or self._new_tokens
        states = self._server.states() if self._watches else {}
        state, hot = states.get(model, "cold"), sum(s == "hot" for s in states.values())
        path, body = self._server.stream(model, self._prompts[prompt], new_tokens)
        began = time.perf_counter()
        first, texts, error = 0.0, [], ""
        try:
            self._connection.request("POST", path, json.dumps(body).encode(), HEADERS)
            answer = self._connection.getresponse()
            if answer.status != 200:
                error = f"{answer.status}: {answer.read(500).decode('utf-8', 'replace')}"
            else:
                for line in answer:
                    if b'"error"' in line:
                        error = f"broke off: {line.decode('utf-8', 'replace')}"
                    elif (text := self._server.token(line)) is not None:
                        first = first or time.perf_counter() - began
                        texts.append(text)
        except (OSError, http.client.HTTPException) as failed:
            self._connection.close()
            error = f"lost: {failed!r}"
        seconds = time.perf_counter() - began
        if not isinstance(self._server, Ours):  # llama.cpp's closes it without saying so
            self._connection.close()
        if not error and len(texts) < new_tokens:
            error = f"lost: {len(texts)} tokens of {new_tokens}"
        text = "".join(texts)
        return Answered(model, prompt, state, hot, began, first, seconds, len(texts), text, error)

    def must(self, model: str, prompt: int = 0, new_tokens: int | None = None) -> Answered:
        """Raises `BenchmarkError` where the answer is an error."""
        answer = self.ask(model, prompt, new_tokens)
        if answer.error:
            raise BenchmarkError(f"{model}: {answer.error}")
        return answer

    def close(self) -> None:
        self._connection.close()


def run(
    server: Ours | LlamaStreams,
    trace: Sequence[tuple[str, int]],
    prompts: Sequence[list[int]],
    clients: int,
    new_tokens: int,
    pause_s: float,
    limit_s: float | None = None,
    watches: bool = True,
) -> tuple[list[Answered], float]:
    """The answers in the order of the trace (of as much of it as `limit_s` allows), and seconds.

    Each client takes the trace's next request once its own is answered and it has paused.
    """
    numbers = itertools.count()
    answers_by_turn: dict[int, Answered] = {}
    began = time.perf_counter()

    def client(number: int) -> None:
        with closing(Client(server, prompts, new_tokens, watches)) as asking:
            time.sleep(pause_s * number / clients)
            while (at := next(numbers)) < len(trace):
                if limit_s is not None and time.perf_counter() - began > limit_s:
                    return
                answers_by_turn[at] = asking.ask(*trace[at])
                time.sleep(pause_s)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return [answers_by_turn[at] for at in sorted(answers_by_turn)], time.perf_counter() - began


def count_faults(
    answers: Sequence[Answered], expected: Mapping[tuple[str, int], str]
) -> dict[str, Any]:
    """Count the answers that differ from those of the model alone."""
    errors = [a.error for a in answers if a.error]
    wrong = [a for a in answers if not a.error and a.text != expected[a.model, a.prompt]]
    return {
        "wrong": len(wrong),
        "lost": sum(not error[0].isdigit() for error in errors),
        "4xx": sum(error.startswith("4") for error in errors),
        "5xx": sum(error.startswith("5") for error in errors),
        "examples": errors[:5],
    }
