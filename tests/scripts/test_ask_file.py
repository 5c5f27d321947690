"""kogpt2 ask --file: order, errors, and what is sent after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.client.errors import CallFailed
from scripts.client.lines import MAX_BYTES, MAX_LINES, Sender, requests_of
from scripts.client.targets import Answer, Call
from tests.e2e.server import REPOSITORY, Server, eventually
from tests.e2e.stores import text
from tests.scripts.conftest import Poets, Run

LINES = "application/jsonlines"


def line(number: int) -> str:
    body = {"inputs": f"나는 오늘 {number}", "parameters": {"max_new_tokens": 4}}
    return json.dumps(body, ensure_ascii=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "리뷰.jsonl"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "답.jsonl"


def texts(out: Path) -> list[str]:
    return [
        json.loads(one).get("generated_text", "") for one in out.read_text("utf-8").splitlines()
    ]


def expected(served: Server, count: int) -> list[str]:
    return [text(served.predict("m0", json.loads(line(i)))) for i in range(count)]


@pytest.mark.parametrize("where", ["--url", "--endpoint"])
def test_answers_are_in_the_order_of_the_lines(
    run: Run, served: Server, poets: Poets, source: Path, out: Path, where: str
) -> None:
    source.write_text("\ufeff" + "\r\n\n".join(map(line, range(80))), "utf-8")
    name, environment = (served.url(""), {}) if where == "--url" else ("poets", poets.environment)
    done = run("ask", "m0", where, name, "--file", source, "--out", out, **environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "80 lines in" in done.stderr
    assert texts(out) == expected(served, 80)


def test_a_wrong_line_has_its_error_and_options_are_for_lines_without_them(
    run: Run, served: Server, source: Path, out: Path
) -> None:
    source.write_text(f'"나는 오늘"\n{{"inputs": ""}}\n나는\n{line(3)}\n', "utf-8")
    options = ("--max-new-tokens", "7", "--url", served.url(""))
    done = run("ask", "m0", *options, "--file", source, "--out", out)
    assert done.returncode == 1
    assert "4 lines in" in done.stderr
    assert "2 errors" in done.stderr
    first, empty, wrong, last = map(json.loads, out.read_text("utf-8").splitlines())
    assert (first["tokens"], last["tokens"]) == (7, 4)
    assert empty["error"]["message"] == "inputs is empty, must be text"
    assert wrong["error"]["type"] == "InvalidRequest"


def test_what_the_output_has_is_not_sent_again_and_a_torn_line_is_dropped(
    run: Run, served: Server, source: Path, out: Path
) -> None:
    source.write_text("\n".join(map(line, range(6))), "utf-8")
    before = '{"generated_text": "앞의 답"}\n' * 4
    out.write_text(before + '{"generated_text": "가실 때', "utf-8")
    served.forget_log()
    command = ("ask", "m0", "--url", served.url(""), "--file", source, "--out", out)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "2 lines in" in done.stderr
    assert "4 were answered before" in done.stderr
    assert out.read_text("utf-8").startswith(before)
    assert texts(out)[4:] == expected(served, 6)[4:]
    assert '"lines": 2' in served.text()
    whole = out.read_bytes()
    assert run(*command).returncode == 0
    assert out.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the command", "the gateway"])
def test_after_a_kill_all_lines_have_their_answers_once(
    run: Run, served: Server, source: Path, out: Path, killed: str
) -> None:
    count = 1000
    source.write_text("\n".join(map(line, range(count))), "utf-8")
    command = ("ask", "m0", "--url", served.url(""), "--file", source, "--out", out)
    with subprocess.Popen(
        [sys.executable, "-m", "scripts.start", *command], cwd=REPOSITORY, stderr=subprocess.PIPE
    ) as process:
        eventually(lambda: out.exists() and out.read_bytes().count(b"\n") > MAX_LINES)
        if killed == "the command":
            process.kill()
        else:
            served.kill_gateway()
        _, error = process.communicate(timeout=120)
        assert process.returncode == (-9 if killed == "the command" else 0), error
    if killed == "the command":
        assert MAX_LINES < len(texts(out)) < count
        assert run(*command).returncode == 0
    single = range(0, count, 50)
    made = texts(out)
    assert len(made) == count
    assert [made[i] for i in single] == [
        text(served.predict("m0", json.loads(line(i)))) for i in single
    ]


def test_wrong_options_and_files_are_refused(
    run: Run, served: Server, source: Path, out: Path, tmp_path: Path
) -> None:
    source.write_text(line(0) + "\n", "utf-8")
    many = tmp_path / "many.jsonl"
    many.write_text("{}\n{}\n", "utf-8")
    where = ("--url", served.url(""))
    for options, message in (
        (("--file", source), "--file and --out belong together"),
        (("가", "--file", source, "--out", out), "--file takes no prompt"),
        (("--file", source, "--out", source), "the same file"),
        (("--file", tmp_path / "없음", "--out", out), "No such file"),
        (("--file", source, "--out", tmp_path / "없음" / "답"), "No such file"),
        (("--file", source, "--out", many), "has 2 answers"),
    ):
        done = run("ask", "m0", *where, *options)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert many.read_text() == "{}\n{}\n"
    with out.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = run("ask", "m0", *where, "--file", source, "--out", out)
        assert (done.returncode, "another command writes" in done.stderr) == (2, True)
    done = run("ask", "없음", *where, "--file", source, "--out", out)
    assert (done.returncode, "(status 404)" in done.stderr) == (1, True)
    done = run("ask", "m0", "--url", "http://127.0.0.1:9", "--file", source, "--out", out)
    assert (done.returncode, "cannot be reached" in done.stderr) == (1, True)
    assert out.read_bytes() == b""


def test_requests_end_one_after_the_other_and_not_together() -> None:
    """The server shares its places among them: where they end together it has nothing to do."""
    groups = [len(group) for group in requests_of(iter([b"1"] * 150))]
    assert groups == [8, 16, 24, 32, 32, 32, 6]
    large = [len(group) for group in requests_of(iter([b"x" * (MAX_BYTES // 3)] * 7))]
    assert large == [3, 3, 1]


class Flaky:
    """A target whose calls end as `ends` say: an error, or a number of answers."""

    def __init__(self, *ends: CallFailed | int) -> None:
        self._ends, self.bodies = list(ends), list[bytes]()

    @contextlib.contextmanager
    def call(self, call: Call) -> Iterator[Answer]:
        self.bodies.append(call.body)
        end = self._ends.pop(0) if self._ends else len(call.body.splitlines())
        if isinstance(end, CallFailed):
            raise end
        answers = b"".join(one + b"\n" for one in call.body.splitlines()[:end])
        yield Answer(LINES, iter([answers[:5], answers[5:], b'"half of']))

    def describe(self, call: Call) -> str:
        return ""


async def test_only_lines_without_an_answer_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Flaky(CallFailed("busy", 503), 2, CallFailed("broken off"), 0)
    sender = Sender(target, "봄", 60)
    monkeypatch.setattr(sender.stopped, "wait", lambda timeout: False)
    lines = [f'"{i}"'.encode() for i in range(4)]
    assert sender.answers(lines) == [one + b"\n" for one in lines]
    assert [body.count(b"\n") + 1 for body in target.bodies] == [4, 4, 2, 2, 2]


@pytest.mark.parametrize(
    "error",
    [CallFailed("no right", 403), CallFailed("cannot be reached"), CallFailed("large", 413)],
)
async def test_what_will_not_change_ends_the_command(error: CallFailed) -> None:
    target = Flaky(error)
    with pytest.raises(CallFailed, match=str(error)):
        Sender(target, "봄", 60).answers([b'"0"'])
    assert len(target.bodies) == 1
