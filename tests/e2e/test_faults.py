"""The faults of Multi Model Server and its toolkit are not seen from outside, and neither is a
process that dies. That each kind comes back under load: tests/chaos."""

from __future__ import annotations

import contextlib
import json
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
import tritonclient.grpc as triton

from tests.e2e.scripts import transform
from tests.e2e.server import Server, eventually
from tests.e2e.stores import (
    ENDLESS,
    LONG,
    SHORT,
    count,
    endless,
    error,
    in_flight,
    running,
    slow,
    small,
    statistics,
    text,
)
from tests.e2e.test_triton import Stream, generated
from tests.processes import has_ended

pytestmark = pytest.mark.slow

BOUND_S = 90.0  # within which every request is answered, whatever dies
WORKER = "model_service_worker"


def fill(server: Server, *names: str) -> Server:
    """Loads these of its models."""
    for seed, name in enumerate(("a", "b", "봄")):
        small(server.store / name, seed)
    slow(server.store / "slow")
    for name in names:
        assert server.load(name).status_code == 200
    return server


@pytest.fixture(scope="module")
def shared(clean: Server) -> Server:
    """A server with `a`, `b` and `slow`, as healthy after each test as before."""
    return fill(clean, "a", "b", "slow")


def workers(server: Server) -> set[int]:
    """The processes of workers and of scripts."""
    return {process.pid for process in server.descendants("--sock-name")}


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker ends with its watcher
            process.kill()


# What Multi Model Server and the toolkit do wrong


def test_ping_is_503_while_a_part_does_not_answer(shared: Server) -> None:
    for words in ("-m engine ", "ModelServer"):
        process = shared.descendants(words)[0]
        process.suspend()
        try:
            eventually(lambda: not shared.is_ready())
            answer = shared.get("/ping")
            assert error(answer) == (503, "ServiceUnavailableException")
        finally:
            process.resume()
        eventually(shared.is_ready)


def test_batching_options_make_nobody_wait(shared: Server) -> None:
    loaded = shared.load("batched", "a", batch_size=8, max_batch_delay=600_000)
    assert loaded.status_code == 200
    assert text(shared.predict("batched", SHORT)) == text(shared.predict("a", SHORT))
    shared.unload("batched")


def test_more_requests_than_its_queue_holds_are_all_answered(shared: Server) -> None:
    with ThreadPoolExecutor(150) as pool:
        answers = list(pool.map(lambda _: shared.predict("a", SHORT), range(150)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({text(answer) for answer in answers}) == 1


def test_java_keeps_to_the_containers_limits(shared: Server) -> None:
    line = shared.descendants("ModelServer")[0].cmdline()
    assert "-Xmx256m" in line
    assert "-XX:+ExitOnOutOfMemoryError" in line
    assert "-XX:-UseContainerSupport" not in line


def test_the_log_is_json_and_has_request_ids_and_models(shared: Server) -> None:
    header = {"x-request-id": "find-me-1", "X-Amzn-SageMaker-Target-Model": "team/a.tar.gz"}
    shared.post("/models/a/invoke", json=SHORT, headers=header)
    found = eventually(lambda: [x for x in shared.text().splitlines() if "find-me-1" in x])
    assert len(found) == 1
    entry = json.loads(found[0])
    assert (entry["model"], entry["status"]) == ("team/a.tar.gz", 200)
    whole = shared.log.read_text("utf-8")
    for line in whole.splitlines():  # those of Java and of MMS's start, too
        assert {"time", "level", "process", "message"} <= set(json.loads(line)), line
    assert "Model server started." in whole


# Processes that die while requests run


@pytest.fixture
def own(breakable: Server) -> Server:
    """A server with `a` and `b` that the test may break."""
    return fill(breakable, "a", "b")


@pytest.mark.parametrize("unloaded", [False, True], ids=["ready", "draining"])
def test_what_is_in_flight_when_all_workers_are_killed_is_answered_soon(
    own: Server, unloaded: bool
) -> None:
    own.load("slow", response_timeout=600)  # it answers twice, beside whatever else runs here
    with ThreadPoolExecutor(1) as pool, in_flight(own, "slow", 2) as busy:
        unload = pool.submit(own.unload, "slow") if unloaded else None
        if unloaded:
            eventually(lambda: own.get("/models/slow").status_code == 404)
        begun, made = count(own, "requests", "slow"), count(own, "steps", "slow")
        kill(own.descendants(WORKER))
        # Where the workers are not back within the lease, the engine counts from nothing.
        twice = 2 * begun
        eventually(
            lambda: all(a.done() for a in busy) or count(own, "requests", "slow") >= twice, BOUND_S
        )
        # Nobody waits for the first ones any more: their rows are free before they could end.
        eventually(lambda: running(own) <= 4)
        more = count(own, "steps", "slow") - made
        assert more < LONG["parameters"]["max_new_tokens"] or all(a.done() for a in busy)
        assert {answer.result().status_code for answer in busy} == {200}
        assert unload is None or unload.result().status_code == 200


def test_a_request_under_which_java_ends_twice_is_not_asked_again(own: Server) -> None:
    endless(own.store / "endless")
    assert own.load("endless").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own.predict, "endless", ENDLESS)
        for _ in range(2):
            eventually(lambda: running(own) > 0)
            kill(own.descendants("ModelServer"))
            eventually(lambda: running(own) == 0)
        assert error(answer.result(BOUND_S)) == (500, "WorkerFailedException")
    eventually(lambda: text(own.predict("a", SHORT)), BOUND_S)
    assert own.text().count("Model server started.") <= 3


def test_a_worker_that_is_killed_during_its_load_fails_it_soon_and_leaves_nothing(
    own: Server,
) -> None:
    before = workers(own)
    # A worker that ends before it listens is started again, see below: its script runs first.
    load = "print('the script loads', flush=True); time.sleep(600)"
    transform(own.store / "hangs", "return 'x'", load=load, top="import time")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own.load, "hangs")
        eventually(lambda: "the script loads" in own.text())
        kill([p for p in own.descendants("--sock-name") if p.pid not in before])
        assert error(answer.result(BOUND_S)) == (500, "WorkerFailedException")
    eventually(lambda: workers(own) == before)
    eventually(lambda: len(statistics(own)["models"]) == 2)
    assert text(own.predict("봄", SHORT))


def test_a_worker_that_ends_before_it_listens_is_started_again(own: Server) -> None:
    assert own.load("봄").status_code == 200
    number = max(int(path.suffix[1:]) for path in own.run_dir.glob(".mms.sock.*"))
    assert own.unload("봄").status_code == 200
    in_the_way = own.run_dir / f".mms.sock.{number + 1}"
    in_the_way.mkdir()  # where the next worker would listen: it ends without a word
    assert own.load("봄").status_code == 200
    assert "Backend stream closed" in own.text()
    assert text(own.predict("봄", SHORT))
    assert own.unload("봄").status_code == 200
    # One of Multi Model Server's threads still waits, and with it whoever it was to serve.
    before = own.text().count("Model server started.")
    own.descendants("ModelServer")[0].kill()
    eventually(lambda: own.text().count("Model server started.") > before)
    eventually(own.is_ready)


def test_a_stop_finishes_what_is_in_flight_and_streamed(own: Server) -> None:
    """By Ctrl-C; SIGTERM: tests/platform."""
    own.load("slow")
    below = own.descendants()
    with (
        triton.InferenceServerClient(own.grpc_address) as client,
        in_flight(own, "slow", 1) as busy,
    ):
        stream = Stream(client)
        stream.ask("slow", id="1", max_new_tokens=300)
        first, _ = stream.next()
        own.process.send_signal(signal.SIGINT)
        with contextlib.suppress(requests.ConnectionError):  # it has ended already
            eventually(lambda: not own.is_ready())
            assert error(own.predict("slow", SHORT))[0] == 503
        assert len([generated(first), *stream.texts(1)["1"]]) == 300
        assert {answer.result().status_code for answer in busy} == {200}
        client.stop_stream()
    assert own.process.wait(BOUND_S) == 0
    assert not [p for p in below if not has_ended(p)]
