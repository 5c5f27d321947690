"""The faults of a run and their times, drawn from a seed or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from command.errors import Problem

PROCESSES = ("java", "launcher", "engine", "gateway", "host", "worker", "zygote", "texts")
STORE = ("stall", "truncate", "403", "503", "change", "gone")
DISKS = ("run", "cache", "prepared")
# The weight of each. A fault that a machine does not allow is skipped: a seed is the same plan
# everywhere.
KINDS = {
    **{f"kill {name}": 3 for name in PROCESSES},
    **{f"stop {name}": 2 for name in PROCESSES},
    **{f"store {mode}": 2 for mode in STORE},
    **{f"disk {name}": 2 for name in DISKS},
    "memory": 2,
    "clock": 2,
    "slow connections": 2,
}
SHORTEST_S, LONGEST_S = 0.3, 4.0


@dataclass(frozen=True)
class Fault:
    """`seconds`: its length, unless it is a kill. `pick` chooses among processes of a kind."""

    at_s: float
    kind: str
    seconds: float = 0.0
    pick: int = 0


@dataclass(frozen=True)
class Plan:
    """`multi_model`: as on SageMaker, where calls load no models."""

    seed: int
    seconds: float
    multi_model: bool
    faults: tuple[Fault, ...]

    @classmethod
    def draw(
        cls, seed: int, seconds: float, every_s: float, kinds: Sequence[str] = tuple(KINDS)
    ) -> Plan:
        """A fault every `every_s` on average, and none in the last `every_s`."""
        chance = random.Random(seed)  # noqa: S311
        weights = [KINDS[kind] for kind in kinds]
        faults, at_s = [], every_s * chance.uniform(0.5, 1)
        while at_s < seconds - every_s:
            kind = chance.choices(kinds, weights)[0]
            length = round(chance.uniform(SHORTEST_S, LONGEST_S), 2)
            faults.append(Fault(round(at_s, 2), kind, length, chance.randrange(1000)))
            at_s += every_s * chance.uniform(0.5, 1.5)
        return cls(seed, seconds, seed % 2 == 1, tuple(faults))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises `Problem`."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            faults = tuple(Fault(**fault) for fault in value.pop("faults"))
            plan = cls(**value, faults=faults)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Problem(f"{path} is no plan of python -m tests.chaos: {error}") from None
        if unknown := {fault.kind for fault in faults} - set(KINDS):
            raise Problem(f"{path} has an unknown fault: {min(unknown)}")
        return plan
