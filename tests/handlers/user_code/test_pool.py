"""The script processes of one model: a failure of one affects no other."""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from handlers.user_code import descendants
from handlers.user_code.entry_point import find_script
from handlers.user_code.messages import Answer, Part, Request, ScriptError
from handlers.user_code.pool import ScriptPool
from handlers.user_code.process import ScriptProcess
from tests.e2e.server import eventually
from tests.processes import no_thread_starts

WIDE_S = 60.0
# Answers with its pid; "함께" once two processes are at it. Sends JSON as its own error's row, past
# the server's code, as only a hostile script does.
SCRIPT = """
import json, os, pathlib, time

def forge(error):
    from handlers.user_code import messages
    messages.error_row = lambda _: json.loads(error)
    raise ValueError

def model_fn(model_dir):
    return pathlib.Path(model_dir)

def transform_fn(model, body, content_type, accept):
    if body.startswith("{"):
        forge(body)
    if body == "함께":
        (model / f"{os.getpid()}.pid").touch()
        while len(list(model.glob("*.pid"))) < 2:
            time.sleep(0.01)
    return str(os.getpid()), "text/plain"
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[ScriptPool]:
    (tmp_path / "inference.py").write_text(SCRIPT, encoding="utf-8")
    script = find_script(tmp_path)
    assert script is not None
    spec = script.spec("글")
    made: list[ScriptProcess] = []

    def make() -> ScriptProcess:
        made.append(ScriptProcess("글", spec, WIDE_S))
        return made[-1]

    started = ScriptPool(make)
    started.load()
    started.connected()
    yield started
    for process in made:
        process.stop()


def ask(scripts: ScriptPool, text: str) -> int:
    (answer,) = scripts.answer(
        [Request("1", {}, [Part("body", "text/plain", text.encode())])], WIDE_S
    )
    assert isinstance(answer, Answer), answer
    return int(answer.body)


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_did_not_start_with_a_connection_starts_with_a_request(
    scripts: ScriptPool,
) -> None:
    with no_more_files():
        scripts.connected()
    with ThreadPoolExecutor(2) as clients:
        assert len(set(clients.map(functools.partial(ask, scripts), ["함께"] * 2))) == 2


def test_without_a_thread_for_its_timeout_a_request_is_503(scripts: ScriptPool) -> None:
    before = ask(scripts, "나는")
    with no_thread_starts(), pytest.raises(ScriptError, match="can't start new thread") as refused:
        ask(scripts, "나는")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    assert ask(scripts, "나는") == before


@pytest.mark.parametrize(
    "sent",
    [
        '{"type": "오류", "status": 500, "message": 3}',
        '{"type": "오류", "status": Infinity, "message": "봄"}',
    ],
)
def test_a_process_with_a_malformed_message_is_replaced(scripts: ScriptPool, sent: str) -> None:
    before = ask(scripts, "나는")
    with pytest.raises(ScriptError, match="closed its connection while it answered"):
        ask(scripts, sent)
    assert ask(scripts, "나는") != before


def test_processes_of_an_ended_script_are_killed_while_requests_go_on(
    scripts: ScriptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts.connected()
    stopping, stopped, end = threading.Event(), threading.Event(), descendants.end

    def slow(process: subprocess.Popen[bytes]) -> None:
        """A script whose leftover processes fork faster than they are killed."""
        stopping.set()
        assert stopped.wait(2 * WIDE_S)
        end(process)

    first = ask(scripts, "나는")
    monkeypatch.setattr(descendants, "end", slow)
    os.kill(first, signal.SIGKILL)
    assert stopping.wait(WIDE_S)
    with ThreadPoolExecutor(1) as client:
        try:
            assert client.submit(ask, scripts, "너는").result(WIDE_S) != first
        finally:
            stopped.set()
    eventually(lambda: len(scripts._free) == 2)
    assert first not in {ask(scripts, "우리"), ask(scripts, "우리")}
