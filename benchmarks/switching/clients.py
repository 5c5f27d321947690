"""Clients that ask many models by streams, one after the other each, and what they saw."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.process import BenchmarkError

ANSWER_S = 120.0
STATES = ("hot", "warm", "parked", "cold")


class Server(Protocol):
    """What is asked: ours, or a peer's."""

    port: int
    pid: int

    def states(self) -> dict[str, str]:
        """By model, one of `STATES`; a model that is not named is cold."""
        ...

    def call(self, model: str, ids: list[int], new_tokens: int) -> tuple[str, dict[str, Any]]:
        """The path and the body of a call that answers with a stream."""
        ...

    def token(self, line: bytes) -> str | None:
        """The text of a line of the stream; None if it brings no token."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Asked:
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


class Client:
    """One connection that stays open."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)

    def ask(self, model: str, prompt: int, ids: list[int], new_tokens: int) -> Asked:
        states = self._server.states()
        state, hot = states.get(model, "cold"), sum(s == "hot" for s in states.values())
        path, body = self._server.call(model, ids, new_tokens)
        headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
        began = time.perf_counter()
        first, texts, error = 0.0, [], ""
        try:
            self._connection.request("POST", path, json.dumps(body).encode(), headers)
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
        if not error and len(texts) < new_tokens:
            error = f"lost: {len(texts)} tokens of {new_tokens}"
        text = "".join(texts)
        return Asked(model, prompt, state, hot, began, first, seconds, len(texts), text, error)

    def close(self) -> None:
        self._connection.close()


def run(
    server: Server,
    trace: Sequence[tuple[str, int]],
    prompts: Sequence[list[int]],
    clients: int,
    new_tokens: int,
    pause_s: float,
    limit_s: float | None = None,
) -> tuple[list[Asked], float]:
    """The answers in the order of the trace (of as much of it as `limit_s` allows), and seconds.

    Each client takes the trace's next request once its own is answered and it has paused.
    """
    numbers = itertools.count()
    found: dict[int, Asked] = {}
    failures: list[BaseException] = []
    began = time.perf_counter()

    def client(offset_s: float) -> None:
        asking = Client(server)
        try:
            time.sleep(offset_s)
            while (number := next(numbers)) < len(trace) and not failures:
                if limit_s is not None and time.perf_counter() - began > limit_s:
                    return
                model, prompt = trace[number]
                found[number] = asking.ask(model, prompt, prompts[prompt], new_tokens)
                time.sleep(pause_s)
        except BaseException as error:
            failures.append(error)
        finally:
            asking.close()

    offsets = [pause_s * i / clients for i in range(clients)]
    threads = [threading.Thread(target=client, args=(offset,)) for offset in offsets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise BenchmarkError(f"a client failed: {failures[0]!r}")
    return [found[number] for number in sorted(found)], time.perf_counter() - began


def count_faults(
    answers: Sequence[Asked], expected: Mapping[tuple[str, int], str]
) -> dict[str, Any]:
    """How many answers are not what the model said when it was asked alone."""
    errors = [a.error for a in answers if a.error]
    wrong = [a for a in answers if not a.error and a.text != expected[a.model, a.prompt]]
    return {
        "wrong": len(wrong),
        "lost": sum(not error[0].isdigit() for error in errors),
        "4xx": sum(error.startswith("4") for error in errors),
        "5xx": sum(error.startswith("5") for error in errors),
        "examples": errors[:5],
    }
