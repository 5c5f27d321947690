"""Runs `kogpt2` within this process; imports take half a second in a new one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from scripts import cli


def run(
    *arguments: str | Path,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    main: Callable[[list[str]], int] = cli.main,
) -> subprocess.CompletedProcess[str]:
    """Runs a command line to its end, with these environment variables only (default: ours)."""
    given = [str(argument) for argument in arguments]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    variables = os.environ if environment is None else environment
    with (
        mock.patch.dict(os.environ, dict(variables), clear=True),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(given)
    written = [stream.buffer.getvalue().decode("utf-8") for stream in (out, err)]
    assert "Traceback" not in written[1], written[1]
    return subprocess.CompletedProcess(given, status, *written)


def output(done: subprocess.CompletedProcess[str]) -> str:
    """What a command prints that succeeds."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(done: subprocess.CompletedProcess[str], *statuses: int) -> str:
    """The one line of a command that fails with one of these statuses and prints nothing else."""
    assert done.returncode in statuses, done.stdout + done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    return done.stderr
