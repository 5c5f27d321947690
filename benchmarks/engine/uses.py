"""Requests as users send them: sampled, ragged and long prompts, chats, several answers.

They go to this engine, this server and peers, so only numpy and the standard library are imported:
the module also runs in the environments of the peers. Prompts are new in each round, so that no
prefix cache has them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.worker import at_once

ROWS = 8
TURNS = 8
ANSWERS = 8
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
RATES = ("greedy", "sampled", "ragged")


# ask(prompt, new_tokens, sampled=False, answers=1) waits for the end, in any number of threads. Its
# result has `ids` of the first answer, the number of `tokens` of all answers, and the seconds until
# the first token of any answer, `first_s`, and until all answers have one, `all_begun_s`.
Ask = Callable[..., Any]


def measurement(ask: Ask) -> Callable[..., dict[str, Any]]:
    """Return the `measure` command, which sends its requests by `ask`."""
    seeds = itertools.count()

    def measure(
        vocab_size: int,
        max_length: int,
        prompt_tokens: int,
        new_tokens: int,
        pause_s: float,
        parts: Sequence[str],
    ) -> dict[str, Any]:
        """Measure `parts`, keys of `how`; `pause_s` is the pause between a chat's turns."""

        def prompt(length: int) -> list[int]:
            rng = np.random.default_rng(next(seeds))
            ids: list[int] = rng.integers(4, vocab_size, length).tolist()
            return ids

        def tokens_per_s(work: list[tuple[int, int]], sampled: bool = False) -> float:
            """Return tokens per second of `ROWS` clients; `work` has (prompt, answer) lengths."""
            prompts = [prompt(length) for length, _ in work]
            news = [new for _, new in work]
            answers, seconds = at_once(ROWS, partial(ask, sampled=sampled), prompts, news)
            return float(sum(answer.tokens for answer in answers) / seconds)

        def chat(pause_s: float) -> list[float]:
            """Return seconds to each turn's first token; the second follows `history` tokens."""
            text, results = prompt(history - answer), []
            for _ in range(TURNS):
                reply = ask(text, answer)
                results.append(reply.first_s)
                text = text + reply.ids + prompt(line)
                time.sleep(pause_s)
            return results

        def answers() -> dict[str, float]:
            one = ask(prompt(history // 4), 1, True)
            several = ask(prompt(history // 4), 1, True, ANSWERS)
            return {"one_s": one.first_s, "all_s": several.all_begun_s}

        history, answer, line = (max_length // part for part in (2, 32, 64))
        equal = [(prompt_tokens, new_tokens)] * ROWS
        longest = max_length * 2 // 5  # of 1,024 some 400
        lengths = np.linspace(5, longest, 2 * ROWS).astype(int).tolist()
        news = np.linspace(new_tokens // 4, new_tokens, 2 * ROWS).astype(int).tolist()
        order = np.random.default_rng(0).permutation(2 * ROWS).tolist()
        ragged = [(lengths[i], news[-i]) for i in order]
        long = (max_length // 2, max_length - 24)
        how: dict[str, Callable[[], Any]] = {
            "greedy_tokens_per_s": lambda: tokens_per_s(equal),
            "sampled_tokens_per_s": lambda: tokens_per_s(equal, sampled=True),
            "ragged_tokens_per_s": lambda: tokens_per_s(ragged),
            "long_prompts_s": lambda: {str(n): ask(prompt(n), 1).first_s for n in long},
            "chat_s": lambda: chat(pause_s),
            "chat_at_once_s": lambda: chat(0),
            "answers": answers,
        }
        if next(seeds) == 0:  # to warm up
            chat(0)
            tokens_per_s([(prompt_tokens, 2)] * ROWS, sampled=True)
        return {"history": history, **{part: how[part]() for part in parts}}

    return measure


PARTS = (*(f"{rate}_tokens_per_s" for rate in RATES), "long_prompts_s", "chat_s", "answers")
PREFIX_CACHED = ("chat_s", "chat_at_once_s", "answers")  # parts that depend on the prefix cache
