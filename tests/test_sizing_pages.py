"""The numbers of docs/operate/sizing.md and docs/deploy/fleet.md follow from the code, and from the
run in docs/develop/benchmark.json."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from common.memory import MIB
from engine import backends
from engine.artifacts.config import KOGPT2
from engine.budget import budget_bytes
from engine.settings import Settings

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZING, FLEET = (DOCS / name for name in ("operate/sizing.md", "deploy/fleet.md"))
BENCHMARK = DOCS / "develop" / "benchmark.json"
WEIGHTS = [backends.weight_bytes(KOGPT2, precision, "cpu") for precision in ("int8", "fp32")]
ROWS = [backends.row_bytes(KOGPT2, precision) for precision in ("int8", "fp32")]
BUDGET_MIB = budget_bytes(8192 * MIB) / MIB
EXAMPLE = r"^.*--memory 8g.*$"
KEPT = 0.6  # of the pace, as the page on fleets says: 40% to spare


def cells(page: Path, row: str) -> list[str]:
    """The cells of a table's row that begins with `row`."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", page.read_text("utf-8"), re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def test_a_models_sizes_are_those_of_the_code() -> None:
    mib = [f"{math.ceil(size / MIB)} MiB" for size in WEIGHTS]
    assert cells(SIZING, "weights of a hot model") == mib
    per_token = [f"{size / KOGPT2.max_length / 1000:.0f} KB" for size in ROWS]
    assert cells(SIZING, "keys and values of a token") == per_token
    prepared = [f"{size / 1e6:.0f} MB" for size in WEIGHTS]
    assert cells(SIZING, "prepared file in `ENGINE_CACHE_DIR`") == prepared
    text = SIZING.read_text("utf-8")
    assert f"(budget − {ROWS[0] / MIB:.0f} MiB for one request) ÷ {mib[0]}" in text
    assert f"`ENGINE_OVERCOMMIT` ({Settings.overcommit})" in text


def test_the_example_adds_up() -> None:
    (line,) = re.findall(EXAMPLE, SIZING.read_text("utf-8"), re.MULTILINE)
    begin, processes, budget, hot, disk = re.split(r": processes|; budget|; hot|; disk", line)
    models, *_ = numbers(begin)
    first, second, count, each, tokenizer, sum_mib, rest_mib = numbers(processes)
    assert count == models
    assert sum_mib == first + second + models * each + tokenizer <= rest_mib == 8192 - BUDGET_MIB
    assert numbers(budget) == [BUDGET_MIB]
    of_budget, row, weights, number_hot = numbers(hot)
    assert (of_budget, row, weights) == (
        BUDGET_MIB,
        math.floor(ROWS[0] / MIB),
        math.ceil(WEIGHTS[0] / MIB),
    )
    assert number_hot == (of_budget - row) // weights
    artifact, prepared = numbers(cells(SIZING, "artifact in `MODEL_CACHE` (fp16)")[0]), WEIGHTS[0]
    assert numbers(disk) == [
        models * artifact[0] // 1000,
        math.ceil(models * prepared / 1e9),
    ]


def test_how_many_servers_follows_from_these() -> None:
    rounds = json.loads(BENCHMARK.read_text("utf-8"))["uses"]["server"]["rounds"]
    over_http = statistics.median(each["greedy_tokens_per_s"] for each in rounds)
    rate = numbers(cells(FLEET, "*R* requests a second with answers of *T* tokens")[0])
    assert rate == [round(KEPT * over_http, -2)]
    on_disk = numbers(cells(FLEET, "*N* fine-tunes, all on disks of 100 GB")[0])
    assert on_disk == [100_000 // numbers(cells(SIZING, "artifact in `MODEL_CACHE` (fp16)")[0])[0]]
    (in_memory,) = numbers(cells(FLEET, "*N* fine-tunes, all in memory")[0])
    assert in_memory <= (BUDGET_MIB - ROWS[0] / MIB) // math.ceil(WEIGHTS[0] / MIB)


@pytest.mark.parametrize(("page", "lines"), [(SIZING, rf"^\|.*$|{EXAMPLE}"), (FLEET, r"/ \d+ \|$")])
def test_both_languages_have_the_same_numbers(page: Path, lines: str) -> None:
    texts = (path.read_text("utf-8") for path in (page, page.with_suffix(".ko.md")))
    english, korean = (
        sorted(numbers("".join(re.findall(lines, text, re.MULTILINE)))) for text in texts
    )
    assert english == korean != []
