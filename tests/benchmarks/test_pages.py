"""The numbers of the README and of docs/develop/benchmark.md are those of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.measurements import EngineRun
from benchmarks.report import pages
from command.errors import Problem


def test_the_pages_have_the_numbers_of_the_runs() -> None:
    """`kogpt2 bench --pages` writes them."""
    names = []
    for page, text in pages.written(pages.read()):
        assert page.read_text("utf-8") == text, page
        names += [name for _, name, _ in pages.BLOCK.findall(text)]
    assert sorted(names) == sorted(pages.BLOCKS)


def test_numbers_of_two_commits_do_not_come_onto_one_page(tmp_path: Path) -> None:
    files = []
    for file in (pages.ENGINE, pages.GATEWAY):
        files.append(tmp_path / file.name)
        text = json.loads(file.read_text("utf-8"))
        files[-1].write_text(json.dumps({**text, "commit": file.stem}), "utf-8")
    with pytest.raises(Problem, match="measure both on one commit"):
        pages.read(*files)


def test_parts_of_a_run_come_together_if_they_are_of_one_commit(tmp_path: Path) -> None:
    first = EngineRun(EngineRun.QUICK, ["mxnet", "uses"], tmp_path)
    first.results |= {"contenders": {"mxnet": {}}, "skipped": {"loading": "봄", "uses": "겨울"}}
    second = EngineRun(EngineRun.QUICK, ["loading", "uses"], tmp_path)
    second.add_to(first.results)
    assert second.results["contenders"] == {"mxnet": {}}
    assert second.results["skipped"] == {}
    assert second.results["wanted"] == ["mxnet", "uses", "loading"]
    with pytest.raises(Problem, match="its commit is"):
        second.add_to({**first.results, "commit": "다른 커밋"})


def test_contenders_are_compared_within_one_run_only(tmp_path: Path) -> None:
    first, second = (EngineRun(EngineRun.QUICK, [name], tmp_path) for name in ("mxnet", "guides"))
    second.add_to({**first.results, "contenders": {"mxnet": {}}})
    assert second.results["contenders"] == {}
