"""The plan of a load test: models and their popularity, prompts, and the rate of requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from command.documents import read_text
from command.errors import Problem
from scripts.client.options import request_body

PROMPTS = (
    "나는 오늘",
    "산에는 꽃 피네",
    "죽는 날까지 하늘을 우러러",
    "비가 오는 날에는 집에서",
    "서울에서 부산까지 기차로",
)


@dataclass(frozen=True)
class Plan:
    """The models, load and duration of a load test.

    models: the most popular first
    zipf: the k-th model is called in proportion to 1/k^zipf; 0: all alike
    users: number of clients, each of which waits for its answer before the next request; or
    rate: requests a second, independent of answers (Poisson arrivals)
    warm_up_s: time before `seconds`, whose requests are not counted
    """

    where: str
    models: tuple[str, ...]
    prompts: tuple[str, ...]
    parameters: dict[str, Any]
    zipf: float
    users: int
    rate: float | None
    seconds: float
    warm_up_s: float
    timeout_s: float
    stream: bool
    seed: int

    def shares(self) -> list[float]:
        """Each model's share of the requests; the sum is 1."""
        weights = [rank**-self.zipf for rank in range(1, len(self.models) + 1)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def describe(self) -> dict[str, Any]:
        """The plan as JSON for the report, with the number of prompts for their texts."""
        return {**asdict(self), "models": list(self.models), "prompts": len(self.prompts)}


class Chooser:
    """Draws (model, body) pairs. Users with the same seed and number draw the same."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._chance = random.Random(f"{plan.seed}/{number}")  # noqa: S311
        self._models = plan.models
        self._cumulative = list(itertools.accumulate(plan.shares()))
        self._bodies = [
            request_body(prompt, plan.parameters, stream=plan.stream) for prompt in plan.prompts
        ]

    def next(self) -> tuple[str, bytes]:
        model = self._chance.choices(self._models, cum_weights=self._cumulative)[0]
        return model, self._chance.choice(self._bodies)

    def pause_s(self, rate: float) -> float:
        """Draw the pause before the next of Poisson arrivals."""
        return self._chance.expovariate(rate)


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """Read a prompt a line, in UTF-8 (default: `PROMPTS`). Raises `Problem`."""
    if path is None:
        return PROMPTS
    lines = read_text(path).splitlines()
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise Problem(f"{path} has no prompt: write one a line")
    return prompts


def read_models(text: str) -> tuple[str, ...]:
    """Parse `a,b,c`, or `@FILE` with one name a line. Raises `Problem`."""
    names: Sequence[str] = text.split(",")
    if text.startswith("@"):
        names = read_text(Path(text[1:])).splitlines()
    unique = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not unique:
        raise Problem(f"--models {text} names no model")
    return unique
