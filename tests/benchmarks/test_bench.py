"""kogpt2 bench measures a tiny model, and its ratios are those of its own rounds."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from benchmarks.__main__ import main
from benchmarks.adapters import tables as adapters
from benchmarks.adapters.measurements import AdaptersRun
from benchmarks.classifiers import tables as classifiers
from benchmarks.contenders import peers
from benchmarks.deltas import measurements as deltas
from benchmarks.engine import tables, uses
from benchmarks.fleet import measurements as fleet
from benchmarks.forms import measurements as forms
from benchmarks.gateway import measurements as gateway
from benchmarks.hard import measurements as hard
from benchmarks.report import tables as report
from benchmarks.report.tables import added, judge
from benchmarks.run import in_turns
from benchmarks.switching import clients as switching_clients
from benchmarks.switching import tables as switching
from benchmarks.switching.measurements import SwitchingRun
from engine.artifacts.open import open_artifact
from testbed import fine_tunes, hard_model, random_model
from testbed.control_group import ControlGroup
from testbed.process import ROOT, ProgramError
from testbed.server import Server, Streamed
from tests.fleet.haproxy import needs_haproxy
from tests.fleet.upstream import upstreams
from tests.scripts import command

pytestmark = pytest.mark.slow

OURS = ("mxnet", "fp32", "int8")
PARTS = ("bandwidth", "turns", "uses", "speculation", "loading", "memory", "accuracy", "profile")


def run(folder: Path, *args: str) -> tuple[dict[str, Any], str]:
    """The results and the output of a quick run."""
    file = folder / "found.json"
    given = ("--quick", *args, "--workdir", folder, "--json", file)
    program = [sys.executable, "-m", "benchmarks", "bench", *given]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text(encoding="utf-8")), done.stdout


def test_engines_are_measured_and_their_texts_are_those_of_the_guides(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--only", ",".join(("guides", *OURS, *PARTS)))
    assert set(results["skipped"]) <= peers.NAMES
    assert set(PARTS) <= set(results)
    assert tables.lines(results) in output
    contenders = results["contenders"]
    for name, entries in contenders.items():
        assert set(entries["rows"]) == ({"1"} if name == "guides" else {"1", "8"})
        for rows in entries["rows"].values():
            (entry,) = rows["rounds"]
            assert 0 < entry["step_s"] < entry["seconds"]
    assert contenders["fp32"]["ids"] == contenders["guides"]["ids"]
    assert contenders["mxnet"]["ids"] == contenders["int8"]["ids"]
    for name in OURS:  # a step reads all weights but the positions of others
        assert contenders[name]["weight_bytes"] - contenders[name]["step_bytes"] == 4 * 128 * 64
    read = {max(kernels.values()) for kernels in results["bandwidth"]["rounds"]}
    (entry,) = contenders["int8"]["rows"]["1"]["rounds"]
    assert set(entry["read_bytes_per_s"]) <= read
    floor = next(goal for goal in results["goals"] if "floor" in goal["name"])
    floor_s = contenders["int8"]["step_bytes"] / max(entry["read_bytes_per_s"])
    assert floor["rounds"] == pytest.approx([entry["step_s"] / floor_s])
    for entry in (*results["loading"]["warm"], *results["loading"]["cold"]):
        assert 0 < entry["ready_s"] < entry["first_token_s"]
    used = {name: system["rounds"][0] for name, system in results["uses"].items()}
    for name in ("engine", "server"):
        assert all(used[name][f"{use}_tokens_per_s"] > 0 for use in uses.RATES)
    assert all(min(one["chat_s"]) > 0 and min(one["answers"].values()) > 0 for one in used.values())


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (("--gateway",), gateway.lines),
        pytest.param(("--fleet", "--only", "proxy"), fleet.lines, marks=needs_haproxy),
        (("--forms",), forms.lines),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_what_is_asked_for_is_measured_and_shown(
    tmp_path: Path, options: tuple[str, ...], lines: Callable[[dict[str, Any]], str]
) -> None:
    results, output = run(tmp_path, *options)
    assert results["skipped"] == {}
    assert lines(results) in output
    assert options[1:] or all("value" in goal for goal in results["goals"])


def test_int8_is_compared_on_hard_models(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--hard", "--only", "dongju")
    assert set(results["skipped"]) <= peers.NAMES
    assert hard.lines(results) in output
    assert set(results["dongju"]) == set(hard_model.KINDS)
    for measured in results["dongju"].values():
        assert measured["int8"]["top1_agreement"] > 0.9
        assert measured["int8"]["kl_divergence"] < 0.01


def test_classifiers_are_measured_beside_peers_generators_and_a_batch(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--classifiers")
    assert set(results["skipped"]) <= peers.NAMES
    assert classifiers.lines(results) in output
    measured, plan = results["speeds"], results["plan"]
    for name in ("fp32", "int8"):
        assert classifiers.probabilities(results, name).shape == (plan["texts"], 2)
    errors = classifiers.probabilities(results, "int8") - classifiers.probabilities(results, "fp32")
    assert 0 < np.abs(errors).max() < 0.05
    assert set(measured) >= {"fp32", "int8", "adapter", "adapters", "http"}
    for name in ("adapter", "whole"):
        (beside,) = results["gaps"][name]
        assert beside["texts_per_s"] > 0
        assert beside["gaps_s"]
    assert results["lines"]["lines"] == plan["lines"]


def test_deltas_are_compared_with_int8_on_fine_tunes(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--deltas")
    assert results["skipped"] == {}
    assert deltas.lines(results) in output
    assert {part: len(results[part]) for part in fine_tunes.KINDS} == {
        "dongju": 1, "pages": 1, "random": 1
    }  # fmt: skip
    for measured in itertools.chain.from_iterable(results[p].values() for p in fine_tunes.KINDS):
        assert measured["delta"]["bytes"] < measured["int8"]["bytes"]
        assert measured["delta"]["top1_agreement"] > 0.9
    assert all(goal["value"]["median"] > 0 for goal in results["goals"])


def test_a_fine_tune_that_is_no_delta_has_a_reason_and_no_part_in_the_goal() -> None:
    errors = {"top1_agreement": 1, "tokens": 64, "relative_logit_error": 0.01}
    errors |= {"same_texts": 7, "texts": 8, "bytes": 1 << 20}
    int8, delta = ({**errors, "kl_divergence": kl} for kl in (0.01, 0.012))
    results: dict[str, Any] = {
        "dongju": {"가": {"delta": delta, "int8": int8}, "나": {"int8": int8, "whole": "too far"}},
        "pages": {},
        "random": {},
    }
    (goal,) = judge(results, deltas.GOALS[-1:])
    assert goal["value"]["median"] == pytest.approx(1.2)
    shown = [(name, way, mib) for name, way, mib, *_ in deltas._rows(results)]
    assert shown == [
        ("가", "delta", "1.0"),
        ("가", "int8", "1.0"),
        ("나", "no delta: too far", ""),
        ("나", "int8", "1.0"),
    ]


def test_a_hard_model_without_a_peer_has_an_empty_cell_and_the_goal_is_the_worst_model() -> None:
    def model(**kl: float) -> dict[str, Any]:
        """The errors of contenders, of which the KL differs."""
        same = {"top1_agreement": 1, "tokens": 64, "relative_logit_error": 0.01}
        same |= {"same_texts": 7, "texts": 8}
        return {name: {**same, "kl_divergence": value} for name, value in kl.items()}

    better, worse = ({"int8": kl, "llama.cpp": 0.02, "openvino": 0.1} for kl in (0.01, 0.06))
    results = {
        "dongju": {"unchanged": model(**better), "values x 100": model(**worse)},
        "sowol": {"unchanged": model(**better)},
        "pages": {},
        "random": {"heavy tails": model(**better)},
    }
    (goal,) = judge(results, hard.GOALS)
    assert goal["value"]["median"] == pytest.approx(3)
    assert goal["met"] is False
    del results["random"]["heavy tails"]["openvino"]
    (goal,) = judge(results, hard.GOALS)
    assert "value" not in goal
    rows = {name: cells for name, *cells in hard._kl_rows(results)}
    assert rows["dongju, values x 100"] == ["2.0e-02", "1.0e-01", "6.0e-02"]
    assert rows["random, heavy tails"] == ["2.0e-02", "", "1.0e-02"]
    engines = [(name, engine) for name, engine, *_ in hard._rows(results)]
    assert ("dongju, unchanged", "OpenVINO int8") in engines
    assert ("random, heavy tails", "OpenVINO int8") not in engines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sweep", "--sweep is for --switching"),
        ("--against HEAD --adapters", "--against is for --switching"),
        ("--cpus 0.5", "--cpus is for --fleet"),
        ("--minutes 1", "--minutes is for --switching or --adapters"),
        ("--engine-mib 720 --fleet", "--engine-mib is for --switching or --adapters"),
        ("--container-mib 4096 --forms", "--container-mib is for --switching or --adapters"),
        ("--clients 4 --fleet", "--clients is for --switching, --adapters or the run that"),
        (
            "--rounds 2 --gateway",
            "--rounds is for --fleet, --switching, --adapters, --forms, --deltas",
        ),
        ("--plot 그림.png --fleet", "--plot is for --switching or the run that no option names"),
        ("--pages --quick", "--quick is for --gateway, --fleet"),
        ("--hard --rounds 2", "--rounds is for --fleet"),
        ("--gateway --fleet", "give --gateway or --fleet, not both"),
        ("--cpus 0 --fleet", "Invalid value for '--cpus': 0 is not a number above 0"),
    ],
)
def test_an_option_of_another_run_is_refused(options: str, message: str) -> None:
    refused = command.refusal(command.run("bench", *options.split(), main=main), 2)
    assert refused.startswith(f"bench: {message}")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, option: str
) -> None:
    file = tmp_path / "없음" / "그림"
    given = ("--quick", "--only", "int8", "--workdir", tmp_path, option, file)
    done = command.run("bench", *given, main=main)
    assert done.returncode == 2
    assert done.stderr.endswith(f"bench: cannot write {file}: No such file or directory\n")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("content", ["{", "[1]", '{"plan": {}}'])
def test_what_no_run_has_written_is_not_added_to(tmp_path: Path, content: str) -> None:
    file = tmp_path / "잰 것.json"
    file.write_text(content, encoding="utf-8")
    given = ("--quick", "--hard", "--workdir", tmp_path, "--add", "--json", file)
    done = command.run("bench", *given, main=main)
    assert done.returncode == 2
    assert done.stderr.endswith(f"bench: --add: {file} is no JSON of kogpt2 bench\n")
    assert file.read_text(encoding="utf-8") == content


def test_a_goal_is_the_median_over_rounds_and_one_not_measured_has_no_value() -> None:
    def contender(*seconds: list[float]) -> dict[str, Any]:
        """A contender's results for one row and for eight."""
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
    assert guides["value"] == pytest.approx({"min": 10, "median": 31, "max": 40})
    assert guides["met"] is True
    assert "value" not in entries["int8, B=1, against llama.cpp Q8_0"]


def test_the_random_model_is_tokenized_into_what_it_wrote(tmp_path: Path) -> None:
    folder = random_model.make(tmp_path, random_model.TINY, seed=0)
    tokenizer = open_artifact(folder).tokenizer_file
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    ids = np.random.default_rng(1).integers(len(random_model.SPECIAL), len(model), 50).tolist()
    text = "".join(model.id_to_piece(i) for i in ids)
    assert model.encode(text) == ids
    assert random_model.text_of([random_model.BOS, *ids]) == text


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


def test_the_disk_that_has_the_store_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")  # which is on no disk
    try:
        group = ControlGroup(read_mb_s=50, store=tmp_path)
    except FileNotFoundError as error:
        pytest.skip(f"{tmp_path} is on no disk, either: {error}")
    (setting,) = group._limits.values()
    disk = os.stat(tmp_path).st_dev
    blocks = Path(f"/sys/dev/block/{setting.split()[0]}").resolve()
    assert f"{os.major(disk)}:{os.minor(disk)}" in {
        file.read_text("ascii").strip() for file in (blocks / "dev", *blocks.glob("*/dev"))
    }


def test_what_the_gateway_adds_is_the_median_difference_of_pairs() -> None:
    calls = {"gateway_ms": [3.0, 50.0, 4.0], "mms_ms": [2.5, 49.0, 9.0]}
    assert added(calls, "gateway_ms", "mms_ms") == [0.5]


def test_a_fleets_rate_is_over_the_time_until_the_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # each reading of the clock is a second later
    plan = fleet.Plan(random_model.TINY, seconds=30)
    run = fleet.FleetRun(plan, [], tmp_path)
    assert run.text
    with upstreams(1) as (server,):
        monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
        connect = partial(http.client.HTTPConnection, "127.0.0.1", server.port)
        calls, seconds = run._round(connect, 1, 0)
    assert calls
    assert seconds >= plan.seconds + fleet.CLIENTS  # whose last readings are after the end


def test_ways_take_turns_and_the_first_rounds_do_not_count() -> None:
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    ways = {name: partial(call, name) for name in ("봄", "가을")}
    assert in_turns(ways, rounds=2, warm_up=1) == {"봄": [3, 5], "가을": [4, 6]}
    assert calls == ["봄", "가을"] * 3


@pytest.mark.parametrize("options", [(), ("--one-base",)])
def test_switching_is_measured_and_every_answer_is_the_models_own(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    results, output = run(tmp_path, "--switching", *options, "--only", "trace,swaps,registered")
    assert set(results["skipped"]) <= peers.NAMES
    assert switching.lines(results) in output
    trace, models = results["trace"]["now"], results["plan"]["models"]
    assert trace["faults"] == {"wrong": 0, "lost": 0, "4xx": 0, "5xx": 0}
    (one,) = trace["rounds"]
    assert len(one["requests"]) == results["plan"]["requests"]
    for answered in one["requests"]:
        assert 0 < answered["first_s"] <= answered["seconds"]
        assert answered["tokens"] == results["plan"]["new_tokens"]
    assert trace["hits"]["LRU"] <= trace["hits"]["Belady"] <= 1
    assert len(results["swaps"]["now"]["requests"]) == models
    registered = results["registered"]["now"]
    assert [row["state"] for row in registered["first_call"]] == ["cold"] * models
    assert not any(row["error"] for row in registered["first_call"] + registered["any_call"])


def test_beside_peers_that_compute_all_prompts_ours_does_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    def start(server: Server, *_: Any, environment: dict[str, str], **__: Any) -> None:
        started.append(environment)
        raise ProgramError("not started")

    monkeypatch.setattr(Server, "__init__", start)
    monkeypatch.setattr(peers, "ENVIRONMENT", tmp_path)  # no peer is installed
    among_adapters = AdaptersRun(AdaptersRun.QUICK, ["peers"], tmp_path)
    among_adapters.prepare()
    assert among_adapters.peers() == []
    switched = SwitchingRun(SwitchingRun.QUICK, ["trace"], tmp_path)
    switched.sides = [switched._side("now", ROOT)]
    assert switched.trace() == {}
    assert [settings.get("ENGINE_PREFIX_CACHE_MIB") for settings in started] == ["0"] * 4


def test_adapters_are_measured_and_every_answer_is_the_adapters_own(tmp_path: Path) -> None:
    results, output = run(tmp_path, "--adapters", "--only", "steps,first,trace")
    assert results["skipped"] == {}
    assert adapters.lines(results) in output
    faults = {"wrong": 0, "lost": 0, "4xx": 0, "5xx": 0, "examples": []}
    assert results["trace"]["faults"] == faults
    assert results["trace"]["requests"] > 0
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


def test_a_stream_by_the_gateway_that_begins_with_an_error_fails() -> None:
    with (
        answering(200, 'data: {"error": "😴"}\n\n') as connection,
        pytest.raises(ProgramError, match="/v1/completions answered 200"),
    ):
        gateway._stream(connection, "/v1/completions", b"{}")


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


def test_a_failed_request_has_no_latency_and_meets_no_goal() -> None:
    def request(state: str, seconds: float, error: str = "") -> dict[str, Any]:
        return {"model": "봄", "state": state, "first_s": seconds, "error": error}

    requests = [request("hot", 0.1), request("warm", 0.3), request("warm", 0.0, "503: 😴")]
    faults = dict.fromkeys(report.FAULTS, 0)
    one = {"requests": requests, "warm_up": [], "at_once": 1, "faults": faults}
    joined = switching_clients.joined([{**one, "tokens_per_s": 1.0, "alone_tokens_per_s": 1.0}])
    firsts = joined["first_token_s"]
    assert {state: (q["count"], q["p50"]) for state, q in firsts.items()} == {
        "all": (2, pytest.approx(0.2)),
        "hot": (1, 0.1),
        "warm": (1, 0.3),
    }
    swaps = {"requests": requests, "cpu_s": 0.0, "engine_ready_s": [0.1]}
    disk = [{**each, "mb_s": 50, "read_bytes": 30_000_000} for each in requests]
    registered = {"first_call": requests}
    results = {
        part: {"now": measured}
        for part, measured in (("swaps", swaps), ("disk", disk), ("registered", registered))
    }
    goals = [*judge(results, (*switching.GOALS, *switching.CONTAINER_GOALS))]
    for name in ("a swap alone", "a miss", "a first call"):
        assert [g["met"] for g in goals if g["name"].startswith(name)] == [False]
    rows = dict(switching._others({"swaps": results["swaps"]}))
    assert rows["now: first token of a warm model, alone, ms"] == "300; 1 of 2 failed"
    _, limits = switching._disk(results["disk"])
    assert [row[:4] for row in limits] == [
        ("now; 1 of 3 failed", "", "", ""),
        ("now: 50", "hot", "1", "100"),
        ("now: 50", "warm", "1", "300"),
    ]


def test_no_two_fine_tunes_share_a_tensor_and_a_hollow_one_takes_no_disk(tmp_path: Path) -> None:
    folders = [*random_model.fine_tunes(tmp_path, random_model.TINY, 3)]
    first, second, third = (open_artifact(folder).weights for folder in folders)
    for name in first:
        assert not np.array_equal(first[name], second[name]), name
        assert not np.array_equal(second[name], third[name]), name
    random_model.hollow(folders[0] / "kogpt2.params")
    hollow, whole = ((folder / "kogpt2.params").stat() for folder in folders[:2])
    assert (hollow.st_size, hollow.st_blocks) == (whole.st_size, 0)
