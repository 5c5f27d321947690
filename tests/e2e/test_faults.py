"""The faults of Multi Model Server and its toolkit are not seen from outside, and neither is a
process that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from tests.e2e.test_metrics import metrics
from tests.e2e.test_triton import Stream, generated
from tests.processes import has_ended

pytestmark = pytest.mark.slow

BOUND_S = 90.0  # within which every request is answered, whatever dies
WORKER = "model_service_worker"
CLIENTS, LAST = 4, 16  # of a load, and the answers that show that all is well again


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


def pipes(server: Server) -> list[str]:
    """Sockets of connections to workers: in RUN_DIR, and those that Multi Model Server reads."""
    found = [str(path) for path in server.run_dir.glob("*-std*")]
    for java in server.descendants("ModelServer"):
        for file in Path(f"/proc/{java.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed meanwhile
                found.append(os.readlink(file))
    return [path for path in found if path.startswith(str(server.run_dir)) and "-std" in path]


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


def test_the_socket_files_of_workers_that_are_gone_are_removed(shared: Server) -> None:
    for _ in range(2):
        assert shared.load("봄").status_code == 200
        assert shared.unload("봄").status_code == 200

    def files() -> int:
        return len(list(shared.run_dir.glob(".mms.sock.*")))

    eventually(lambda: files() == 3)
    assert text(shared.predict("a", SHORT))
    assert not [path for path in shared.run_dir.glob("workers/*") if not any(path.iterdir())]
    assert len(list(shared.run_dir.glob("workers/*"))) == 3


# Processes that die while requests run


class Load:
    """Clients that go on asking; `answers` are what they got, with the seconds it took."""

    def __init__(self, server: Server, names: list[str]) -> None:
        self.server, self.names = server, names
        self.answers: list[tuple[int, float, str]] = []
        self.broken: list[float] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        eventually(lambda: len(self.answers) >= 2 * len(self._threads))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "a request hangs"

    def all_well(self, count: int) -> bool:
        """Whether there are so many answers, and the last of them are good."""
        return len(self.answers) >= count and {s for s, _, _ in self.answers[-LAST:]} == {200}

    def _run(self, i: int) -> None:
        name = self.names[i % len(self.names)]
        while not self._stop.wait(0.05):  # so that they do not take all of a processor
            started = time.monotonic()
            try:
                answer = self.server.predict(name, SHORT)
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                self.broken.append(time.monotonic() - started)
                continue
            if answer.status_code != 200:
                error(answer)
            said = answer.json().get("generated_text", answer.text)
            self.answers.append((answer.status_code, time.monotonic() - started, said))


@pytest.fixture
def own(breakable: Server) -> Server:
    """A server with `a` and `b` that the test may break."""
    return fill(breakable, "a", "b")


@pytest.mark.parametrize(
    ("words", "which", "said"),
    [
        ("-m engine ", slice(0, 1), "the engine was killed by SIGKILL; it is started again"),
        ("ModelServer", slice(0, 1), "Multi Model Server ended"),
        ("serving.mms.launcher", slice(0, 1), "is started again"),
        ("handlers.host", slice(0, 1), "is started again"),
        (WORKER, slice(None), ""),
    ],
    ids=["engine", "java", "launcher", "host", "all workers"],
)
def test_what_is_killed_under_load_comes_back_and_every_request_is_answered(
    own: Server, words: str, which: slice, said: str
) -> None:
    expected = {text(own.predict(name, SHORT)) for name in ("a", "b")}
    with Load(own, ["a", "b"]) as load:
        killed = own.descendants(words)[which]
        assert killed
        kill(killed)
        eventually(lambda: said in own.text())
        since = len(load.answers)
        eventually(lambda: load.all_well(since + LAST), BOUND_S)
        eventually(own.is_ready)
    assert not load.broken
    assert {status for status, _, _ in load.answers} <= {200, 500, 503}
    assert max(seconds for _, seconds, _ in load.answers) < BOUND_S
    assert {said for status, _, said in load.answers if status == 200} == expected
    for name in ("a", "b"):
        assert own.unload(name).status_code == 200
    eventually(lambda: not own.descendants(WORKER))
    eventually(lambda: not pipes(own))
    assert statistics(own)["models"] == []


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


def test_a_gateway_that_is_killed_under_load_comes_back(own: Server) -> None:
    with Load(own, ["a", "b"]) as load:
        own.kill_gateway()
        count = len(load.answers)
        eventually(lambda: load.all_well(count + LAST), BOUND_S)
    assert len(load.broken) <= CLIENTS  # of each client what was in flight: the others waited
    assert {status for status, _, _ in load.answers} == {200}
    for name in ("a", "b"):  # the new one knows its models
        assert own.unload(name).status_code == 200
    eventually(lambda: not own.descendants(WORKER))


def test_a_gateway_that_is_killed_during_a_load_leaves_no_worker_of_it(own: Server) -> None:
    before = workers(own)
    transform(own.store / "hangs", "return 'x'", load="time.sleep(600)", top="import time")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(own.load, "hangs")
        eventually(lambda: workers(own) - before)
        own.kill_gateway()
    names = own.loaded()
    eventually(lambda: len(workers(own)) == len(names))
    assert len(list(own.run_dir.glob("workers/*"))) == len(names)
    assert text(own.predict("slow", SHORT))
    assert text(own.predict("a", SHORT))


def test_idle_models_come_back_after_the_engine_was_killed(own: Server) -> None:
    restarts = ("kogpt2_process_restarts_total", "engine")
    before = metrics(own)[restarts]
    own.descendants("-m engine ")[0].kill()
    eventually(lambda: "the engine was killed by SIGKILL" in own.text())

    def held() -> int:
        try:
            return len(statistics(own)["models"])
        except Exception:
            return 0

    eventually(lambda: held() == 2)
    assert text(own.predict("a", SHORT)) != text(own.predict("b", SHORT))
    assert metrics(own)[restarts] == before + 1


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
