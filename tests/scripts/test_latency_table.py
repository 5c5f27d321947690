"""kogpt2 latency-table measures as the guides do, beside what they publish."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from tests.e2e.server import REPOSITORY, Server
from tests.scripts.command import output, refusal
from tests.scripts.conftest import Run

PUBLISHED = json.loads((REPOSITORY / "scripts/published_latency.json").read_text(encoding="utf-8"))


def test_the_table_has_this_machine_and_every_published_one(
    run: Run, served: Server, tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    options = ("--model", "m0", "--text", "나는 오늘", "--name", "내 컴퓨터", "--json", file)
    shown = output(run("latency-table", "--url", served.url(""), *options))
    calls = json.loads(file.read_text(encoding="utf-8"))["calls"]
    assert len(calls) == 19
    steps = served.predict("m0", "나는 오늘").json()[1]
    for call in calls:
        assert call["steps"] == steps > 1
        assert 0 < call["server_s"] < call["client_s"]
    here = statistics.mean(call["server_s"] / call["steps"] for call in calls)
    client = statistics.mean(call["client_s"] / call["steps"] for call in calls)
    for where, seconds in (("server", here), ("client", client)):
        assert re.search(rf"^내 컴퓨터, .. the {where} +{seconds:.4f} ", shown, re.MULTILINE)
    for machine, seconds in PUBLISHED["seconds_per_token"].items():
        line = next(line for line in shown.splitlines() if line.startswith(machine))
        assert line.split()[-2:] == [f"{seconds:.2f}", f"{seconds / here:.1f}x"]


def test_a_file_that_cannot_be_written_is_refused_before_a_call(run: Run, tmp_path: Path) -> None:
    for file, reason in (("없음/a.json", "No such file or directory"), ("", "Is a directory")):
        command = ("latency-table", "--url", "http://127.0.0.1:9", "--json", tmp_path / file)
        message = f"latency-table: cannot write {tmp_path / file}: {reason}\n"
        assert refusal(run(*command), 2) == message


def test_an_empty_prompt_is_refused(run: Run) -> None:
    assert "--text is empty" in refusal(run("latency-table", "--text", ""), 2)
