"""Writes the numbers of a run into the pages: each between two comments that name it.

All of them come from docs/develop/benchmark.json and docs/develop/benchmark-gateway.json, which
`kogpt2 bench --pages` reads; a test holds the pages against them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine import tables
from benchmarks.engine.speeds import tokens_per_s
from benchmarks.gateway import measurements as gateway
from benchmarks.process import ROOT
from benchmarks.report import goals, machine
from benchmarks.report.tables import goal_table, table
from command.errors import Problem

Results = dict[str, Any]

DOCS = ROOT / "docs" / "develop"
ENGINE, GATEWAY = DOCS / "benchmark.json", DOCS / "benchmark-gateway.json"
PAGES = ("README.md", "README.ko.md", "docs/develop/benchmark.md")
BLOCK = re.compile(r"(<!-- benchmark: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PEERS = ("llama.cpp", "openvino", "ctranslate2")


def read(engine: Path = ENGINE, gateway_file: Path = GATEWAY) -> Results:
    """Read both files and judge them by today's goals.

    Raises `Problem` where they are of different commits.
    """
    values: Results = json.loads(engine.read_text(encoding="utf-8"))
    values["gateway"] = json.loads(gateway_file.read_text(encoding="utf-8"))
    if values["commit"] != values["gateway"]["commit"]:
        raise Problem(
            f"{engine.name} is of {values['commit']}, {gateway_file.name} of"
            f" {values['gateway']['commit']}: measure both on one commit"
        )
    values["goals"] = list(goals.goals(values, tables.GOALS))
    values["gateway"]["goals"] = list(goals.goals(values["gateway"], gateway.GOALS))
    return values


def written(results: Results) -> Iterator[tuple[Path, str]]:
    """Each page, and its text with these results."""
    for name in PAGES:
        page = ROOT / name
        yield page, BLOCK.sub(lambda values: _block(results, values), page.read_text("utf-8"))


def write() -> list[Path]:
    """Returns the pages that changed. Raises `Problem`."""
    changed = [(page, text) for page, text in written(read()) if text != page.read_text("utf-8")]
    for page, text in changed:
        page.write_text(text, encoding="utf-8")
    return [page for page, _ in changed]


def _block(results: Results, values: re.Match[str]) -> str:
    begin, name, end = values.groups()
    return f"{begin}{BLOCKS[name](results).strip()}\n{end}"


def _conditions(results: Results) -> str:
    what, config = results["plan"], results["plan"]["config"]
    load = results["machine"]["load_average_before"]
    quiet = "quiet" if load <= results["machine"]["cores"] / 4 else "loud"
    lines = machine.lines(results["machine"])
    return (
        f"Commit {results['commit']}, {quiet}. {lines[0]}. {lines[1]}. A random model of"
        f" {config['num_layers']} layers, {config['units']} units, vocabulary"
        f" {config['vocab_size']:,}; {what['prompt_tokens']}-token prompt, {what['new_tokens']} new"
        f" tokens; medians of {what['rounds']} rounds, with the least and the most."
    )


def _missed(results: Results) -> list[Results]:
    every = [*results["goals"], *results["gateway"]["goals"]]
    return [goal for goal in every if goal.get("met") is False]


def _why(results: Results) -> str:
    return "\n".join(goal_table(_missed(results))) or "None."


def _headline(results: Results, text: str, peer: str, missed: str) -> str:
    def rates(name: str) -> dict[str, float]:
        return {f"b{rows}": statistics.median(tokens_per_s(results, name, rows)) for rows in (1, 8)}

    ours, measured = tables.INT8, results["contenders"]
    against = next(goal for goal in results["goals"] if "guides' loop" in goal["name"])
    peers = [
        peer.format(name=measured[name]["label"], **rates(name))
        for name in PEERS
        if name in measured
    ]
    cold = statistics.median(results["gateway"]["cold"]["full"])
    every = [*results["goals"], *results["gateway"]["goals"]]
    headline = text.format(
        **rates(ours), peers=", ".join(peers), guides=against["value"]["median"], cold=cold
    )
    count = sum("met" in goal for goal in every)
    return f"{headline} {missed.format(count=count, missed=len(_missed(results)))}"


def _english(results: Results) -> str:
    return _headline(
        results,
        "On two cores it makes {b1:.0f} tokens a second for one client and {b8:.0f} for eight"
        " (in the same run {peers}), {guides:.0f} times as fast as the AWS guides' loop, and a"
        " full-size model that is not loaded yet gives its first token after {cold:.1f} s"
        " ([how that was measured](docs/develop/benchmark.md)).",
        "{name} {b1:.0f} and {b8:.0f}",
        "Of {count} goals measured {missed} are missed"
        " ([which, and why](docs/develop/benchmark.md#what-is-missed-and-why)).",
    )


def _korean(results: Results) -> str:
    return _headline(
        results,
        "코어 두 개에서 클라이언트가 하나일 때 초당 {b1:.0f}토큰, 여덟일 때 {b8:.0f}토큰을 만듭니다"
        "(같은 측정에서 {peers}). AWS 가이드의 루프보다 {guides:.0f}배 빠르고, 아직 로드하지 않은"
        " 전체 크기 모델도 {cold:.1f}초면 첫 토큰이 나옵니다"
        "([측정 방법](docs/develop/benchmark.md)).",
        "{name} {b1:.0f}/{b8:.0f}",
        "측정한 목표 {count}개 가운데 {missed}개에는 아직 못 미칩니다"
        "([어떤 것이고 왜 그런지](docs/develop/benchmark.md#what-is-missed-and-why)).",
    )


def _lines(make: Callable[[Results], Iterator[str]]) -> Callable[[Results], str]:
    return lambda results: "\n".join(make(results)) or "Not measured."


BLOCKS: dict[str, Callable[[Results], str]] = {
    "headline": _english,
    "headline.ko": _korean,
    "conditions": _conditions,
    "speeds": _lines(tables.speeds),
    "uses": _lines(tables.uses),
    "others": _lines(lambda r: table(("", ""), [*tables.others(r)])),
    "far": _lines(tables.far),
    "goals": _lines(lambda r: goal_table(r["goals"])),
    "gateway": _lines(lambda r: table(("", ""), [*gateway.rows(r["gateway"])])),
    "gateway-goals": _lines(lambda r: goal_table(r["gateway"]["goals"])),
    "missed": _why,
    "operators": _lines(tables.operators),
}
