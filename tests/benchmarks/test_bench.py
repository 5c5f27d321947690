"""kogpt2 bench measures a tiny model, and its ratios are those of its own rounds."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from benchmarks.__main__ import main
from benchmarks.adapters import tables as adapters
from benchmarks.contenders import peers
from benchmarks.engine import tables, uses
from benchmarks.fleet import measurements as fleet
from benchmarks.forms import measurements as forms
from benchmarks.gateway import measurements as gateway
from benchmarks.report.tables import added, judge
from benchmarks.run import in_turns
from benchmarks.switching import clients as switching_clients
from benchmarks.switching import tables as switching
from engine.artifacts.open import open_artifact
from testbed import random_model
from testbed.control_group import ControlGroup
from testbed.process import ROOT, ProgramError
from testbed.server import Streamed
from tests.fleet.haproxy import needs_haproxy
from tests.fleet.upstream import upstreams
from tests.scripts import command

pytestmark = pytest.mark.slow

OURS = ("mxnet", "fp32", "int8")
PARTS = ("bandwidth", "turns", "uses", "speculation", "loading", "memory", "accuracy", "profile")


def run(folder: Path, *args: str, status: int | None = 0) -> tuple[dict[str, Any], str]:
    """The results and the output of a quick run."""
    file = folder / "found.json"
    given = ("--quick", *args, "--workdir", folder, "--json", file)
    program = [sys.executable, "-m", "benchmarks", "bench", *given]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert status in (done.returncode, None), done.stderr
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the output of a quick run of what needs no peers."""
    only = ",".join(("guides", *OURS, *PARTS))
    return run(tmp_path_factory.mktemp("benchmark"), "--only", only)


@pytest.fixture(scope="module")
def results(measured: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return measured[0]


def test_everything_asked_for_is_measured(results: dict[str, Any]) -> None:
    assert set(results["skipped"]) <= peers.NAMES
    assert set(results["contenders"]) == {"guides", *OURS}
    assert set(PARTS) <= set(results)
    for name, entries in results["contenders"].items():
        assert set(entries["rows"]) == ({"1"} if name == "guides" else {"1", "8"})
        for rows in entries["rows"].values():
            (entry,) = rows["rounds"]
            assert 0 < entry["step_s"] < entry["seconds"]
    assert results["machine"]["cores"] >= 1
    assert {"mxnet", "onnxruntime"} <= set(results["machine"]["packages"])


def test_fp32_writes_the_text_of_the_guides_loop_and_the_operator_that_of_the_library(
    results: dict[str, Any],
) -> None:
    contenders = results["contenders"]
    expected = contenders["guides"]["ids"]
    assert len(expected) == results["plan"]["new_tokens"]
    assert contenders["fp32"]["ids"] == expected
    assert contenders["mxnet"]["ids"] == contenders["int8"]["ids"]


def test_a_goal_is_the_median_over_rounds_and_one_not_measured_has_no_value() -> None:
    def contender(*seconds: list[float]) -> dict[str, Any]:
        """Of one row, and of eight."""
        rounds = [{"rounds": [{"seconds": s} for s in each]} for each in seconds]
        return {"rows": dict(zip(("1", "8"), rounds, strict=False))}

    results = {
        "plan": {"new_tokens": 4},
        "contenders": {
            "guides": contender([10.0, 40.0, 93.0]),
            "int8": contender([1.0, 1.0, 3.0], [2.0, 4.0, 8.0]),
        },
    }
    entries = {goal["name"]: goal for goal in judge(results, tables.GOALS)}
    assert entries["int8, B=8, tokens/s against its own B=1"]["rounds"] == [4, 2, 3]
    guides = entries["int8, B=1, against the guides' loop"]
    assert guides["rounds"] == pytest.approx([10, 40, 31])
    assert guides["value"] == pytest.approx({"min": 10, "median": 31, "max": 40})
    assert guides["met"] is True
    assert "value" not in entries["int8, B=1, against llama.cpp Q8_0"]


def test_the_tables_show_every_goal_and_contender(measured: tuple[dict[str, Any], str]) -> None:
    results, output = measured
    for goal in results["goals"]:
        assert f"| {goal['name']} " in output
    for entries in results["contenders"].values():
        assert f"| {entries['label']} " in output
    assert tables.lines(results) in output


def test_what_people_send_is_asked_of_the_engine_and_of_the_server(results: dict[str, Any]) -> None:
    entries = {name: system["rounds"][0] for name, system in results["uses"].items()}
    assert {"engine", "engine-anew", "server"} <= set(entries)
    for name in ("engine", "server"):
        assert all(entries[name][f"{use}_tokens_per_s"] > 0 for use in uses.RATES)
        assert [*entries[name]["long_prompts_s"]] == ["64", "104"]
    for one in entries.values():
        assert len(one["chat_s"]) == uses.TURNS
        assert min(one["chat_s"]) > 0
        assert min(one["answers"].values()) > 0
    goal = next(g for g in results["goals"] if g["name"].startswith("second turn"))
    assert goal["rounds"] == [1000 * entries["engine"]["chat_s"][1]]


def test_the_floor_is_of_the_moments_around_a_contender_and_of_what_its_step_reads(
    results: dict[str, Any],
) -> None:
    (entry,) = results["contenders"]["int8"]["rows"]["1"]["rounds"]
    read = [max(kernels.values()) for kernels in results["bandwidth"]["rounds"]]
    assert len(read) == 2 * len(results["contenders"])
    assert set(entry["read_bytes_per_s"]) <= set(read)
    size = results["contenders"]["int8"]["step_bytes"]
    goal = next(g for g in results["goals"] if "floor" in g["name"])
    floor_s = size / max(entry["read_bytes_per_s"])
    assert goal["rounds"] == pytest.approx([entry["step_s"] / floor_s])


def test_a_step_reads_all_weights_but_the_positions_of_others(results: dict[str, Any]) -> None:
    contenders = results["contenders"]
    unread = {
        name: contenders[name]["weight_bytes"] - contenders[name]["step_bytes"] for name in OURS
    }
    assert unread == dict.fromkeys(OURS, 4 * 128 * 64)


def test_loads_are_timed_to_ready_and_on_to_the_first_token(results: dict[str, Any]) -> None:
    for entry in (*results["loading"]["warm"], *results["loading"]["cold"]):
        assert 0 < entry["ready_s"] < entry["first_token_s"]
        assert 0 <= entry["resident_share"] <= 1


def test_the_random_model_is_tokenized_into_what_it_wrote(tmp_path: Path) -> None:
    config = random_model.TINY
    folder = random_model.make(tmp_path, config, seed=0)
    artifact = open_artifact(folder)
    assert artifact.config == config
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(artifact.tokenizer_file))
    ids = np.random.default_rng(1).integers(len(random_model.SPECIAL), len(tokenizer), 50).tolist()
    text = "".join(tokenizer.id_to_piece(i) for i in ids)
    assert tokenizer.encode(text) == ids
    assert random_model.text_of([random_model.BOS, *ids]) == text
    before = (folder / "kogpt2.params").stat().st_mtime_ns
    assert random_model.make(tmp_path, config, seed=0) == folder
    assert (folder / "kogpt2.params").stat().st_mtime_ns == before


def test_help_shows_an_example_and_a_wrong_name_lists_the_right_ones() -> None:
    shown = command.run("bench", "--help", main=main)
    assert shown.returncode == 0
    assert "kogpt2 bench --quick" in shown.stdout
    wrong = command.run("bench", "--only", "triton", main=main)
    assert wrong.returncode == 2
    assert "triton" in wrong.stderr
    assert "llama.cpp" in wrong.stderr


def test_the_gateway_is_measured_and_every_goal_of_it_is_shown(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--gateway")
    assert results["skipped"] == {}
    assert set(gateway.GatewayRun.DEFAULT) <= set(results)
    for goal in results["goals"]:
        assert f"| {goal['name']} " in output
        assert goal["value"]["median"] > -100, goal
    assert gateway.lines(results) in output
    assert len(results["calls"]["mms_ms"]) == results["plan"]["calls"]
    cycles = results["cycles"]
    assert len(cycles["after_each"]) > cycles["cycles"]
    assert cycles["after"] == cycles["after_each"][-1]


@needs_haproxy
def test_a_fleet_is_measured_as_far_as_there_are_cores(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--fleet", status=None)
    assert len(results["proxy"]["through_ms"]) == results["plan"]["calls"]
    assert fleet.lines(results) in output
    cores, nodes = len(os.sched_getaffinity(0)), results["plan"]["nodes"]
    assert set(results["nodes"]) == {str(count) for count in nodes if count <= cores}
    assert len(results["skipped"]) == len(nodes) - len(results["nodes"])
    for measured in results["nodes"].values():
        assert min(measured["tokens_per_s"]) > 0


def test_what_runs_in_a_control_group_has_its_processor_time_and_sees_it() -> None:
    busy = """if True:
        import time
        from common.cpus import cpu_count
        began, used = time.monotonic(), time.process_time()
        while time.process_time() < used + 0.3: pass
        print(cpu_count(), time.monotonic() - began)
    """
    try:
        with ControlGroup(cpus=0.2, seen=True) as group:
            command = [*group.prefix, sys.executable, "-c", busy]
            cores, seconds = subprocess.check_output(command, cwd=ROOT, text=True).split()
    except ProgramError as error:
        pytest.skip(str(error))
    assert int(cores) == 1
    assert float(seconds) > 0.6


def test_what_the_gateway_adds_is_the_median_difference_of_pairs() -> None:
    calls = {"gateway_ms": [3.0, 50.0, 4.0], "mms_ms": [2.5, 49.0, 9.0]}
    assert added(calls, "gateway_ms", "mms_ms") == [0.5]


def test_ways_take_turns_and_the_first_rounds_do_not_count() -> None:
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    ways = {name: partial(call, name) for name in ("봄", "가을")}
    assert in_turns(ways, rounds=2, warm_up=1) == {"봄": [3, 5], "가을": [4, 6]}
    assert calls == ["봄", "가을"] * 3


@pytest.fixture
def container_mib() -> int:
    """Of a control group, or 0 where none can be made."""
    try:
        with ControlGroup(1200):
            return 1200
    except ProgramError:
        return 0


def test_switching_is_measured_and_every_answer_is_the_models_own(
    tmp_path: Path, container_mib: int
) -> None:
    parts = ("--only", "trace,swaps,registered,sweep")
    if container_mib:
        parts = (*parts, "--container-mib", str(container_mib))
    results, output = run(tmp_path, "--switching", *parts)
    assert results["skipped"] == {}
    assert switching.lines(results) in output
    # Through containers a second server does not know of them.
    assert set(results["sweep"]) == ({"now", switching.ALL_HOT} if container_mib else {"now"})
    for side, (step,) in results["sweep"].items():
        assert step["container_mib"] == container_mib
        assert bool(step["mib"]) == (side == "now")
        assert sum(step["faults"].values()) == 0
    trace = results["trace"]["now"]
    (one,) = trace["rounds"]
    assert trace["faults"] == {"wrong": 0, "lost": 0, "4xx": 0, "5xx": 0}
    assert len(one["requests"]) == results["plan"]["requests"]
    assert {a["model"] for a in one["requests"]} == set(one["warm_up"])
    for answered in one["requests"]:
        assert 0 < answered["first_s"] <= answered["seconds"]
        assert answered["tokens"] == results["plan"]["new_tokens"]
    states = {state: q["count"] for state, q in trace["first_token_s"].items()}
    assert states.pop("all") == sum(states.values())
    assert set(states) <= set(switching_clients.STATES)
    assert trace["hits"]["LRU"] <= trace["hits"]["Belady"] <= 1
    assert one["memory"]["pss"] <= one["memory"]["rss"]
    assert len(results["swaps"]["now"]["requests"]) == results["plan"]["models"]
    registered = results["registered"]["now"]
    models = results["plan"]["models"]
    assert [row["state"] for row in registered["first_call"]] == ["cold"] * models
    assert not any(row["error"] for row in registered["first_call"] + registered["any_call"])
    assert sum(registered["states"].values()) == models


def test_adapters_are_measured_and_every_answer_is_the_adapters_own(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--adapters", "--only", "steps,first,trace")
    assert results["skipped"] == {}
    assert adapters.lines(results) in output
    faults = {"wrong": 0, "lost": 0, "4xx": 0, "5xx": 0, "examples": []}
    assert results["trace"]["faults"] == faults
    assert results["trace"]["requests"] > 0
    kinds = {one["kind"] for one in results["steps"]}
    assert kinds == {"one model", "adapters", "whole models"}
    assert len(results["first"]["ever"]) == len(results["first"]["again"]) > 0


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (503, "😴", "^503 by /predictions/m: 😴"),
        (200, 'data: {"token": 7, "text": "가", "index": 0}\n\ndata: {"error": {}}\n', "broke off"),
        (200, 'data: {"generated_text": "", "tokens": 0, "index": 0}\n', "made no token"),
    ],
)
def test_a_stream_that_fails_says_how(status: int, content: str, message: str) -> None:
    with answering(status, content) as connection, pytest.raises(ProgramError, match=message):
        Streamed(connection, "/predictions/m", {})


def test_a_stream_has_the_tokens_of_all_answers_and_the_first_ones_text() -> None:
    events = [{"token": 7, "text": "가", "index": 0}, {"token": 9, "text": "라", "index": 1}]
    events += [{"tokens": [8], "content": "나", "index": 0, "stop": False}]  # llama.cpp's
    events += [{"tokens": [7, 8], "content": "", "index": 0, "stop": True}]
    content = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    with answering(200, content) as connection:
        answer = Streamed(connection, "/", {})
    assert (answer.ids, answer.text, answer.tokens) == ([7, 8], "가나", 3)
    assert 0 < answer.first_s <= answer.all_begun_s


@contextmanager
def answering(status: int, content: str) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server that answers so."""
    with upstreams(1) as (server,):
        server.act = lambda handler: handler.answer(status, content.encode())
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as client:
            yield client


def test_an_answer_that_another_model_would_give_is_wrong_and_half_of_one_is_lost() -> None:
    def answered(text: str, error: str = "") -> switching_clients.Answered:
        return switching_clients.Answered("봄", 0, "hot", 1, 0, 0.1, 0.2, 2, text, error)

    answers = [answered("가나"), answered("다라"), answered("가", "lost: 1 tokens of 2")]
    answers += [answered("", "503: 😴")]
    entries = switching_clients.count_faults(answers, {("봄", 0): "가나"})
    assert (entries["wrong"], entries["lost"], entries["4xx"], entries["5xx"]) == (1, 1, 0, 1)


def test_no_two_fine_tunes_share_a_tensor_and_each_is_written_once(tmp_path: Path) -> None:
    folders = [*random_model.fine_tunes(tmp_path, random_model.TINY, 3)]
    first, second, third = (open_artifact(folder).weights for folder in folders)
    for name in first:
        assert not np.array_equal(first[name], second[name]), name
        assert not np.array_equal(second[name], third[name]), name
    written = [(folder / "kogpt2.params").stat().st_mtime_ns for folder in folders]
    assert [*random_model.fine_tunes(tmp_path, random_model.TINY, 3)] == folders
    assert [(folder / "kogpt2.params").stat().st_mtime_ns for folder in folders] == written
    random_model.hollow(folders[0])
    hollow = (folders[0] / "kogpt2.params").stat()
    assert hollow.st_mtime_ns == written[0]
    assert hollow.st_size == (folders[1] / "kogpt2.params").stat().st_size
    assert hollow.st_blocks == 0


def test_forms_are_measured(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--forms")
    assert results["skipped"] == {}
    assert {(one["form"], one["rows"]) for one in results["steps"]} == {
        (form, rows) for form in forms.STEPS for rows in forms.ROWS
    }
    assert [one["answer"] for one in results["answers"]] == [*forms.ANSWERS]
    assert [one["form"] for one in results["stalls"]] == [*forms.HOSTILE]
    assert all(one["seconds"] for one in (*results["steps"], *results["answers"]))
    assert all("value" in goal for goal in results["goals"])
    assert "an object of four fields" in output
