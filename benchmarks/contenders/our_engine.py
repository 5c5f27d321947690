"""Contender: our engine in one process, with its scheduler.

The arguments are models' folders, and settings as NAME=VALUE.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import engine.engine
from benchmarks.engine.request import Request
from benchmarks.engine.uses import SAMPLED, measurement
from benchmarks.worker import Started
from engine.engine import Engine
from engine.guesses import FEWEST, Guesser
from engine.settings import Settings

RIGHT = (0.0, 0.3, 0.6, 1.0)


class Oracle(Guesser):
    """Guesses the next tokens of known texts, each token right with the probability `right`.

    Without texts it makes no guesses.
    """

    texts: Sequence[list[int]] = ()
    right = 0.0
    random = random.Random(1)  # noqa: S311

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        for text in self.texts:
            if text[: len(ids)] == list(ids):
                known = text[len(ids) :][: min(FEWEST, most)]
                return [
                    token if self.random.random() < self.right else max(token - 1, 0)
                    for token in known
                ]
        return []


class Measured:
    """An engine with `folders` loaded as models 0, 1 and so on."""

    def __init__(self, settings: Settings, folders: Sequence[str]) -> None:
        self.engine, self.models = Engine(settings), len(folders)
        for i, folder in enumerate(folders):
            self.engine.load(str(i), folder)

    def ask(
        self, ids: list[int], new_tokens: int, sampled: bool = False, answers: int = 1
    ) -> Request:
        options: dict[str, Any] = {"do_sample": True, "seed": 1, **SAMPLED} if sampled else {}
        options["num_return_sequences"] = answers
        return Request(self.engine, ids, new_tokens, "0", **options).wait()

    def turns(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        """Return tokens per second of one model, of all models in turns, and of a batch on one."""
        work = {
            "alone": [(0, prompts[0])],
            "turns": [(i, prompts[0]) for i in range(self.models)],
            "batch": [(0, ids) for ids in prompts],
        }
        return {
            f"{name}_tokens_per_s": self._tokens_per_s(each, new_tokens, 4 if len(each) == 1 else 1)
            for name, each in work.items()
        }

    def _tokens_per_s(
        self, requests: list[tuple[int, list[int]]], new_tokens: int, times: int
    ) -> float:
        """Return the tokens per second of all requests at once, after a short warm-up."""

        def tokens(count: int) -> int:
            running = [Request(self.engine, ids, count, str(model)) for model, ids in requests]
            return sum(request.wait().tokens for request in running)

        tokens(2)
        began = time.perf_counter()
        return sum(tokens(new_tokens) for _ in range(times)) / (time.perf_counter() - began)

    def speculation(self, prompts: list[list[int]], new_tokens: int) -> dict[str, dict[str, float]]:
        """Return the speedup of speculative decoding, by rows and by the share of right guesses.

        Each answer is known from a first run. The guesses are its tokens, some of them replaced,
        which shows from which share on guesses pay.
        """
        vars(engine.engine)["Guesser"] = Oracle

        def answer(prompt: list[int], texts: Sequence[list[int]]) -> tuple[float, list[int]]:
            Oracle.texts = texts
            began = time.perf_counter()
            ids = self.ask(prompt, new_tokens).ids
            return time.perf_counter() - began, ids

        results = {}
        answer(prompts[-1], ())  # to warm up
        for Oracle.right, prompt in zip(RIGHT, prompts, strict=False):
            without_s, ids = answer(prompt, ())
            guessing_s, again = answer(prompt, [prompt + ids])
            assert again == ids
            results[str(Oracle.right)] = without_s / guessing_s
        return {"1": results}


def start(*arguments: str) -> Started:
    settings: dict[str, Any] = {}
    folders = []
    for argument in arguments:
        name, is_setting, value = argument.partition("=")
        if is_setting and name.isidentifier():
            settings[name] = int(value) if value.isdigit() else value
        else:
            folders.append(argument)
    measured = Measured(Settings(**settings), folders)
    commands: dict[str, Callable[..., Any]] = {
        "measure": measurement(measured.ask),
        "turns": measured.turns,
        "speculation": measured.speculation,
        "close": measured.engine.close,
    }
    return {}, commands
