"""`kogpt2`: help, the commands in pages and examples, errors in one sentence."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer

import benchmarks.__main__ as benchmark_cli
import tests.chaos.__main__ as chaos_cli
from scripts import cli
from tests.e2e.server import REPOSITORY, Server
from tests.fleet.upstream import upstreams
from tests.scripts.command import output, refusal
from tests.scripts.conftest import Run
from tests.test_words import DESCRIBING

GROUPS = [typer.main.get_command(app) for app in (cli.app, benchmark_cli.app)]
COMMANDS = {
    name: command
    for group in GROUPS
    if isinstance(group, click.Group)
    for name, command in group.commands.items()
    if command.add_help_option
}
CHAOS = typer.main.get_command(chaos_cli.app)
PAGES = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("docs/**/*.md"),
    REPOSITORY / "model_store/README.md",
]
# What stands behind an example: what it does, or another program that takes its output.
REST = re.compile(r" {3,}.*| +#.*| [|>] .*")


def lines(text: str) -> list[str]:
    """The lines of a text that call the command, each joined with those that go on from it."""
    text = text.replace("\\\n", " ")
    found = re.findall(
        r"^(?:\$ )?(?:[A-Z_]+=\S+ |taskset \S+ \S+ |echo .*? \| )*(?:\./)?kogpt2 (.*)$", text, re.M
    )
    return [REST.sub("", line) for line in found]


def parse(line: str) -> None:
    """Reads a line as the command would, without running it."""
    name, *arguments = shlex.split(line)
    if name not in cli.SHELL and "--help" not in arguments:
        COMMANDS[name].make_context(name, arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_summary_and_examples_that_parse(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = benchmark_cli.main if name in cli.BENCHMARKS else cli.main
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    command = COMMANDS[name]
    assert command.help
    assert command.help.split()[0] in shown
    examples = lines((command.epilog or "").replace("\n\n", "\n"))
    assert examples or name == "settings"
    for example in examples:
        assert example.split()[0] == name
        parse(example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_commands_of_a_page_parse(page: Path) -> None:
    blocks = re.findall(r"^```.*?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for line in lines("".join(blocks)):
        parse(line)
    for line in re.findall(r"^python -m tests\.chaos(.*)$", "".join(blocks), re.M):
        CHAOS.make_context("chaos", shlex.split(REST.sub("", line)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["package"], "package: Missing argument 'FOLDER'."),
        (["fine-tune", "--steps", "0"], "fine-tune: Invalid value for '--steps': 0 is not in the"),
        (["load-test", "--rate", "-1"], "load-test: Invalid value for '--rate': -1 is not a num"),
        (["load-test", "--web", "70000"], "load-test: Invalid value for '--web': 70000 is not in"),
        (["ask", "소월", "가", "--온도", "1"], "ask: No such option: --온도"),
        (["소월"], "kogpt2: No such command '소월'."),
        (["package", "\udcff"], "package: b'\\xff' is not UTF-8: use a terminal"),
        (["unload", "시\udced"], "unload: b'\\xec\\x8b\\x9c\\xed' is not UTF-8"),
        (["load", "m", "--setting", "a=\udcff"], "load: b'a=\\xff' is not UTF-8"),
        (["models", "--url", "foo"], "models: Invalid value for '--url': 'foo' must begin with"),
        (["models", "--url", "http://[::1"], "models: Invalid value for '--url': 'http://[::1'"),
        (["ask", "a", "b", "--url", "http://h:x"], "ask: Invalid value for '--url': 'http://h:x'"),
        (["load-test", "--url", "http://"], "load-test: Invalid value for '--url': 'http://' must"),
        (["ask", "../models", "hi"], "ask: '../models' is no model name"),
        (["unload", "../../x"], "unload: '../../x' is no model name"),
    ],
)
def test_a_wrong_call_is_refused_in_one_sentence(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(given) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith(message)


def test_an_error_may_show_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    """stderr takes what it cannot encode, as a real stream does."""
    os.mkdir(os.fsencode(tmp_path / "모델") + b"\xff")
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.start",
            "package",
            os.fsencode(tmp_path / "모델") + b"\xff",
        ],
        capture_output=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.count(b"\n") == 1
    assert b"is not UTF-8" in process.stderr


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(tmp_path: Path) -> None:
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "typer.py").write_text(interrupt)  # found before the installed one
    process = subprocess.run(
        [sys.executable, "-m", "scripts.start", "--help"],
        capture_output=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        # A shell's background job, which the tests may be, inherits an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (-signal.SIGINT, b"", b"")


def test_without_a_command_all_are_listed_in_one_mood(run: Run) -> None:
    listed = output(run("--help"))
    summaries = [cli.app.info.help, *cli.SHELL.values(), *cli.BENCHMARKS.values()]
    assert [text for text in summaries if DESCRIBING.match(str(text))] == []
    assert all(re.search(rf"^│ {name} ", listed, re.M) for name in [*COMMANDS, *cli.SHELL])


def test_models_are_loaded_listed_called_and_unloaded(run: Run, served: Server) -> None:
    management = ["--url", served.management("")]
    served.unload("m1")  # an earlier test may have loaded it
    output(run("load", "m1", *management))
    listed = json.loads(output(run("models", "--json", *management)))
    assert "시/봄" in {model["modelName"] for model in listed["available"]}
    assert "m1" in {model["modelName"] for model in listed["loaded"]}
    assert re.search(r"^ *m1 +(hot|parked)", run("models", *management).stdout, re.M)
    ask = ("ask", "m1", "--max-new-tokens", "4", "--url", served.url(""))
    whole, streamed = run(*ask, "나는 오늘", "--no-stream"), run(*ask, stdin="나는 오늘\n")
    assert output(streamed) == output(whole)
    assert "unregistered" in output(run("unload", "m1", *management))
    assert "m1" in refusal(run("unload", "m1", *management), 1)


@pytest.mark.parametrize("name", ["path", "method", "options", "설정"])
def test_a_setting_of_any_name_reaches_the_server(run: Run, served: Server, name: str) -> None:
    load = ("load", "m1", "--url", served.management(""), "--setting", f"{name}=값")
    said = refusal(run(*load), 1)
    assert name in said
    assert "(status 400)" in said


@pytest.mark.parametrize("name", ["url", "model_name"])
def test_a_setting_is_not_what_an_argument_gives(run: Run, name: str) -> None:
    said = refusal(run("load", "m1", "--url", "http://127.0.0.1:9", "--setting", f"{name}=봄"), 2)
    assert said == f"load: --setting {name}: give it as an argument, NAME or ARTIFACT\n"


def test_an_answer_that_is_not_this_servers_is_a_failure(run: Run) -> None:
    with upstreams(1) as [server]:
        server.act = lambda handler: handler.answer(200, "<html>시</html>".encode())
        url = f"http://127.0.0.1:{server.port}"
        said = refusal(run("unload", "m1", "--url", url), 1)
    assert said == f"unload: {url} is not this server's management port: it answers without JSON\n"


def test_a_server_that_is_not_there_is_a_failure(run: Run) -> None:
    for command in (["models"], ["ask", "시", "가"]):
        said = refusal(run(*command, "--url", "http://127.0.0.1:9"), 1)
        reason = "http://127.0.0.1:9 cannot be reached: Connection refused"
        assert said == f"{command[0]}: {reason}\n"


def test_an_error_of_the_system_is_a_sentence_without_its_number(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "파일"
    file.touch()
    model = REPOSITORY / "model_store" / "sowol.tar.gz"
    said = refusal(run("convert", model, file / "모델", "--to", "hf"), 1)
    assert said == f"convert: {file}: File exists\n"


@pytest.mark.parametrize("arguments", [["settings"], ["--help"], ["ask", "--help"]])
def test_a_reader_that_closes_early_is_no_failure(arguments: list[str]) -> None:
    end, out = os.pipe()
    os.close(end)
    with os.fdopen(out, "wb") as pipe:
        program = [sys.executable, "-m", "scripts.start", *arguments]
        done = subprocess.run(
            program, stdout=pipe, stderr=subprocess.PIPE, cwd=REPOSITORY, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")
