"""Foreign data in a process of its own: its limits, and how its end is reported."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from common import landlock
from common.errors import ArtifactError, EngineUnavailable, Overloaded, PromptTooLong
from engine import sandbox
from engine.sandbox import Limits, Sandbox, again
from engine.sandbox.reading import Reading
from tests.engine.sandbox import targets
from tests.processes import eventually, has_ended, nothing_starts_in

WIDE_S = 60.0


def run(target: Any, *arguments: Any, timeout_s: float = WIDE_S, **limits: int) -> Any:
    def once() -> Any:
        with Sandbox(target, *arguments, what="m.params", limits=Limits(**limits)) as child:
            return child.ready(timeout_s)

    return again(once)


def servant(prefix: str = "", what: str = "m") -> Sandbox:
    """A child that is ready for calls."""
    child = Sandbox(targets.servant, prefix, what=what)
    assert child.ready(WIDE_S) is None
    return child


def call(child: Sandbox, text: str, timeout_s: float = WIDE_S) -> Any:
    return child.call(text, timeout_s=timeout_s)


def process_of(child: Sandbox) -> psutil.Process:
    assert child.pid is not None
    return psutil.Process(child.pid)


def helper_of(child: Sandbox) -> psutil.Process:
    helper = process_of(child).parent()
    assert helper is not None
    return helper


def test_a_value_goes_there_and_back() -> None:
    value = {"글": ["나 보기가", 1, 2.5, None, True], "half": "\ud800"}
    assert run(targets.echo, value) == value


def test_calls_one_after_the_other() -> None:
    with servant("답: ") as child:
        assert call(child, "가") == "답: 가 1"
        with pytest.raises(PromptTooLong, match="너무 길어요"):  # our own errors keep their type
            call(child, "refuse")
        assert child.pid is not None
        assert call(child, "나") == "답: 나 3"
    assert child.pid is None
    with pytest.raises(ArtifactError, match="it was cancelled"):
        call(child, "다")


def test_calls_from_many_threads_get_their_own_answers() -> None:
    with servant() as child, ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(call, child, f"#{i}") for i in range(16)]
        assert all(found.result().startswith(f"#{i} ") for i, found in enumerate(calls))


@pytest.mark.parametrize(
    ("target", "options", "how"),
    [
        (targets.segfault, {}, "its reader crashed (SIGSEGV)"),
        (targets.abort, {}, "its reader crashed (SIGABRT)"),
        (targets.leave, {}, "its reader crashed (exit status 3)"),
        (targets.surprise, {}, "its reader failed (LookupError)"),
        (targets.bomb, {}, "it took more than 512 MiB"),
        (targets.native_bomb, {}, "its reader crashed (SIGSEGV)"),
        (targets.loop, {"cpu_s": 1}, "it took more than 1 s of computing"),
        (targets.wait, {"timeout_s": 0.2}, "it took more than 0.2 s"),
        (targets.long_answer, {"answer_mib": 1}, "more than 1048576"),
    ],
)
def test_how_it_ended(target: Callable[[], Any], options: dict[str, Any], how: str) -> None:
    with pytest.raises(ArtifactError, match=r"^m\.params could not be read: ") as caught:
        run(target, **options)
    assert how in caught.value.message
    if target is targets.long_answer:
        run(target)  # as long as answers may be by default


def test_a_call_past_its_deadline_ends_the_process() -> None:
    with servant() as child:
        process = process_of(child)
        with pytest.raises(ArtifactError, match=r"more than 0\.2 s"):
            call(child, "sleep", 0.2)
        assert child.pid is None
        eventually(lambda: has_ended(process))


def test_a_crash_in_a_call_is_told_and_ends_only_this_one() -> None:
    with servant(what="a") as a, servant(what="b") as b:
        with pytest.raises(ArtifactError, match="a could not be read: its reader crashed"):
            call(a, "crash")
        assert a.pid is None
        assert call(b, "가") == "가 1"


def test_killed_from_another_thread() -> None:
    with Sandbox(targets.wait, what="m") as child, ThreadPoolExecutor(1) as pool:
        process = process_of(child)
        pool.submit(child.kill, "it is needed no more")
        with pytest.raises(ArtifactError, match="it is needed no more"):
            child.ready(WIDE_S)
        eventually(lambda: has_ended(process))


@pytest.mark.parametrize("writes", [False, True])
def test_what_it_may_not_do(tmp_path: Path, writes: bool) -> None:
    (tmp_path / "file").write_text("내용", encoding="utf-8")
    own = tmp_path / "own"
    own.write_text("말이다", encoding="utf-8")
    target = targets.attempts_and_write if writes else targets.attempts
    found = Reading().run(
        *(target, str(tmp_path), os.getpid()),
        what="m.params",
        limits=Limits(),
        file=own if writes else None,
    )
    allowed = {"read", "own affinity", "own memory"}
    if not landlock.abi():
        allowed.add("another's memory, to read")
    refused = {name for name, number in found.items() if number in (errno.EPERM, errno.EACCES)}
    assert refused == set(found) - allowed
    assert (tmp_path / "file").read_text(encoding="utf-8") == "내용"
    assert own.read_text(encoding="utf-8") == ("글이다" if writes else "말이다")


def test_it_is_killed_for_memory_before_the_engine_and_holds_nothing_of_it() -> None:
    with (Path(__file__)).open() as held:
        os.set_inheritable(held.fileno(), True)
        found = run(targets.limits)
    assert (found["core"], found["oom"], found["threads"]) == (0, 1000, 1)
    assert found["ignored"] == ["SIGTERM", "SIGINT"]  # a stop is the engine's affair
    assert len(found["open"]) <= 6  # three of every process's, its connection, and the listing


HOLDER = """
import sys
from engine.sandbox import Sandbox
from tests.engine.sandbox import targets
run = Sandbox(targets.log, "경고", what="m")
run.ready(60)
child = Sandbox(targets.loop, what="m")
print("pid", child.pid, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_an_engine_that_is_killed() -> None:
    root = Path(__file__).parents[3]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdin, holder.stdout:
        line = holder.stdout.readline()
        logged = json.loads(line)  # what a child logs is a line of the engine's log
        assert (logged["level"], logged["message"]) == ("warning", "경고")
        pid = int(holder.stdout.readline().split()[1])
        helper = psutil.Process(pid).parent()
        assert helper is not None
        holder.kill()
        holder.wait()
        eventually(lambda: has_ended(pid))
        eventually(lambda: has_ended(helper.pid))


def test_a_reader_that_is_killed_says_nothing_of_what_it_read(tmp_path: Path) -> None:
    read, tried = tmp_path / "글", list[int]()

    def once() -> Any:
        with Sandbox(targets.wait_for, str(read), what="m") as child:
            assert child.pid is not None
            tried.append(child.pid)
            if len(tried) % 3:
                os.kill(child.pid, signal.SIGKILL)
            else:
                read.write_text("나", "utf-8")
            return child.ready(WIDE_S)

    with pytest.raises(EngineUnavailable, match="m could not be read: its reader was killed"):
        again(once)
    assert again(once) == "나"
    assert len(tried) == 3


def test_without_a_process_it_is_to_be_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with servant() as child:
        helper = helper_of(child)
    helper.kill()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(Overloaded, match=r"no process .* 글\.model") as refused:
        servant(what="글.model")
    assert refused.value.retry_after_s == 1
    monkeypatch.undo()
    assert run(targets.echo, "나") == "나"


def test_what_is_lost_with_the_helper_is_done_again(tmp_path: Path) -> None:
    file = tmp_path / "글"
    with servant() as child, ThreadPoolExecutor(1) as pool:
        process, helper = process_of(child), helper_of(child)
        found = pool.submit(run, targets.wait_for, str(file))
        eventually(lambda: len(helper.children()) == 2)
        helper.kill()
        eventually(lambda: has_ended(helper) and has_ended(process))
        with pytest.raises(EngineUnavailable, match="went away"):  # the file is not to blame
            call(child, "가")
        file.write_text("다시", encoding="utf-8")
        assert found.result() == "다시"


def test_a_fork_that_fails_costs_one_sandbox_only(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = sandbox._Helper()
    helper.prepare("tests.engine.sandbox.targets", "tests.engine.sandbox.unprivileged")
    monkeypatch.setattr(sandbox, "_helper", helper)
    try:
        with servant() as child:
            with nothing_starts_in(helper_of(child).pid):
                for _ in range(2):
                    with pytest.raises(Overloaded, match=r"글\.model: Resource temporarily una"):
                        servant(what="글.model")
            assert call(child, "가") == "가 1"
            with servant() as other:
                assert helper_of(other) == helper_of(child)
    finally:
        helper.close()


def test_only_the_helper_signals_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of one that has ended may be another process's."""
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    with servant() as ended, Sandbox(targets.loop, what="n") as lives:
        process = process_of(lives)
        with pytest.raises(ArtifactError, match="SIGSEGV"):
            call(ended, "crash")
    assert not signalled
    eventually(lambda: has_ended(process))
