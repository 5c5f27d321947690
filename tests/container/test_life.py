"""Starting, stopping, dying and coming back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.container.conftest import Start
from tests.container.containers import PROMPT, TEXT, Container, docker, mount
from tests.e2e.server import eventually
from tests.e2e.stores import FAST, SHORT, slow

pytestmark = pytest.mark.container

# One or two seconds of work for `slow`, on cores that are free.
LONG = {"inputs": "나는 오늘", "parameters": {"max_new_tokens": 1500, "temperature": 0.01}}
WATCHED = ["--health-interval", "1s", "--health-retries", "2", "--health-start-period", "0s"]


@pytest.fixture(scope="module")
def own(image: str) -> Iterator[Container]:
    """A container that the tests below break; each leaves it running."""
    with closing(Container(*WATCHED)) as container:
        yield container.wait_until_ready()


def answers(container: Container) -> bool:
    answer = container.predict("sowol", PROMPT)
    return answer.status_code == 200 and answer.json()["generated_text"].startswith(TEXT)


def test_what_is_killed_inside_comes_back_and_the_log_says_so(own: Container) -> None:
    """Java, which PID 1 has to adopt; tests/chaos kills all others, without a container."""
    assert answers(own)
    before = own.log()
    own.signal(signal.SIGKILL, "com.amazonaws.ml.mms.ModelServer")
    eventually(lambda: "Multi Model Server ended" in own.log()[len(before) :])
    eventually(lambda: own.is_ready() and answers(own))
    assert own.state()["Running"]


def test_the_healthcheck_tells_when_it_is_ill_and_when_it_is_well(own: Container) -> None:
    eventually(lambda: own.health() == "healthy")
    own.signal(signal.SIGSTOP, "-m engine ")
    eventually(lambda: own.health() == "unhealthy")
    own.signal(signal.SIGCONT, "-m engine ")
    eventually(lambda: own.health() == "healthy")
    assert answers(own)


@pytest.mark.parametrize("end", [("stop",), ("kill", "-s", "KILL")], ids=["stopped", "killed"])
def test_a_container_that_ended_starts_again(own: Container, end: tuple[str, ...]) -> None:
    docker(*end, own.id)
    assert not own.state()["Running"]
    docker("start", own.id)
    own.wait_until_ready()
    eventually(lambda: own.health() == "healthy")
    assert answers(own)


def test_a_stop_lets_requests_in_flight_finish(start: Start, tmp_path: Path) -> None:
    slow(tmp_path / "store" / "slow")
    options = mount(tmp_path / "store", "/models")
    container = start(*options, MODEL_STORE="/models", DRAIN_S="110", **FAST)
    assert container.predict("slow", SHORT).ok
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(container.predict, "slow", LONG) for _ in range(4)]
        eventually(lambda: container.running() == 4)
        # So long that only a server which does not end by itself is killed: its status says so.
        docker("stop", "--time", "120", container.id, timeout_s=150)
        done = [future.result() for future in asked]
    assert [answer.status_code for answer in done] == [200] * 4
    assert all(answer.json()["generated_text"] for answer in done)
    state = container.state()
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
