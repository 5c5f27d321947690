"""Writes the numbers of a run into the pages: each between two comments that name it.

All of them come from docs/develop/benchmark.json and docs/develop/benchmark-gateway.json, which
`kogpt2 bench --pages` reads; a test compares the pages with them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.engine import tables
from benchmarks.engine.speeds import tokens_per_s
from benchmarks.gateway import measurements as gateway
from benchmarks.report.tables import Results, Table, goal_table, judge, sizes, table
from command.errors import Problem
from testbed import machine
from testbed.process import ROOT

DOCS = ROOT / "docs" / "develop"
ENGINE, GATEWAY = DOCS / "benchmark.json", DOCS / "benchmark-gateway.json"
PAGES = ("README.md", "README.ko.md", "docs/develop/benchmark.md")
BLOCK = re.compile(r"(<!-- benchmark: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    values["goals"] = [*judge(values, tables.GOALS)]
    values["gateway"]["goals"] = [*judge(values["gateway"], gateway.GOALS)]
    return values


def written(results: Results) -> Iterator[tuple[Path, str]]:
    """Yield each page and its text with these results."""
    for name in PAGES:
        page = ROOT / name
        yield page, BLOCK.sub(lambda values: _block(results, values), page.read_text("utf-8"))


def write() -> list[Path]:
    """Update the pages and return those that changed. Raises `Problem`."""
    changed = [(page, text) for page, text in written(read()) if text != page.read_text("utf-8")]
    for page, text in changed:
        page.write_text(text, encoding="utf-8")
    return [page for page, _ in changed]


def _block(results: Results, values: re.Match[str]) -> str:
    begin, name, end = values.groups()
    return f"{begin}{BLOCKS[name](results).strip()}\n{end}"


def _conditions(results: Results) -> str:
    load = results["machine"]["load_average_before"]
    quiet = "quiet" if load <= results["machine"]["cores"] / 4 else "loud"
    lines = machine.lines(results["machine"])
    return (
        f"Commit {results['commit']}, {quiet}. {lines[0]}. {lines[1]}. A random model of"
        f" {sizes(results['plan'])}, with the least and the most."
    )


def _goals(results: Results, missed: bool = False) -> list[Results]:
    every = [*results["goals"], *results["gateway"]["goals"]]
    return [goal for goal in every if "met" in goal and not (missed and goal["met"])]


KERNELS = {"amx_int8": "AMX", "avx512_vnni": "VNNI", "avx2": "AVX2"}  # the best first

HEADLINES = {
    "headline": (
        "On two cores with {kernels}: {b1:.0f} tokens a second for one client, {b8:.0f} for eight"
        " ({peers}),"
        " {guides:.0f} times as fast as the AWS guides' loop. A full-size model that is prepared,"
        " but not loaded, gives its first token after {cold:.1f} s"
        " ([measured](docs/develop/benchmark.md) at {commit:.8}).",
        "{name} {b1:.0f} and {b8:.0f}",
        "Of {count} goals [{missed} are missed](docs/develop/benchmark.md#what-is-missed-and-why).",
    ),
    "headline.ko": (
        "코어 두 개({kernels})에서 클라이언트가 하나면 초당 {b1:.0f}토큰, 여덟이면 {b8:.0f}토큰을"
        " 만듭니다"
        "({peers}). AWS 가이드의 루프보다 {guides:.0f}배 빠르고, 준비되어 있지만 로드하지 않은"
        " 전체 크기 모델도 {cold:.1f}초면 첫 토큰이 나옵니다"
        "({commit:.8}에서 [측정](docs/develop/benchmark.md)).",
        "{name} {b1:.0f}/{b8:.0f}",
        "목표 {count}개 가운데"
        " [{missed}개에는 아직 못 미칩니다](docs/develop/benchmark.md#what-is-missed-and-why).",
    ),
}


def _headline(results: Results, texts: tuple[str, str, str]) -> str:
    text, peer, missed = texts

    def rates(name: str) -> dict[str, float]:
        return {f"b{rows}": statistics.median(tokens_per_s(results, name, rows)) for rows in (1, 8)}

    measured = results["contenders"]
    peers = [
        peer.format(name=measured[name]["label"], **rates(name))
        for name in tables.PEERS
        if name in measured
    ]
    guides = next(goal for goal in results["goals"] if "guides' loop" in goal["name"])
    counts = {"count": len(_goals(results)), "missed": len(_goals(results, missed=True))}
    sets = results["machine"]["instruction_sets"]
    headline = text.format(
        **rates(tables.INT8),
        kernels=next((name for one, name in KERNELS.items() if one in sets), "no AVX2"),
        peers=", ".join(peers),
        commit=results["commit"],
        guides=guides["value"]["median"],
        cold=statistics.median(results["gateway"]["cold"]["full"]),
    )
    return f"{headline} {missed.format(**counts)}"


def _table(of: Callable[[Results], Table], none: str = "Not measured.") -> Callable[[Results], str]:
    return lambda results: "\n".join(table(*of(results))) or none


BLOCKS: dict[str, Callable[[Results], str]] = {
    **{name: partial(_headline, texts=texts) for name, texts in HEADLINES.items()},
    "conditions": _conditions,
    "speeds": _table(tables.speeds),
    "uses": _table(tables.uses),
    "others": _table(tables.others),
    "far": _table(tables.far),
    "goals": _table(lambda r: goal_table(r["goals"])),
    "gateway": _table(lambda r: gateway.rows(r["gateway"])),
    "gateway-goals": _table(lambda r: goal_table(r["gateway"]["goals"])),
    "missed": _table(lambda r: goal_table(_goals(r, missed=True)), "None."),
    "operators": _table(tables.operators),
}
