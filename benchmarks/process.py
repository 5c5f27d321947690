"""Measured programs, seen from outside: start, wait, call, end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from command.errors import Failed

ROOT = Path(__file__).resolve().parents[1]
WORKDIR = Path(tempfile.gettempdir()) / "kogpt2-benchmark"
START_S = 120.0
ANSWER_S = 300.0
STOP_S = 15.0

P = TypeVar("P", bound="Program")


class BenchmarkError(Failed):
    """Something could not be measured; the message says what and why."""


def fetch(url: str, timeout_s: float) -> bytes:
    """Send a request to a program on this machine, past any proxy that the environment names.

    Raises `OSError`.
    """
    past_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with past_proxies.open(url, timeout=timeout_s) as answer:
        content: bytes = answer.read()
        return content


class Program:
    """A program on this process's cores, which writes to `log`. A context manager.

    `ready_s` is how long it took to what `_wait` waited for.
    """

    backend: ClassVar[str] = (
        "mxnet"  # ours in int8, the image's; quick ones start sooner by "native"
    )
    ready_s: float

    def __init__(
        self,
        command: Sequence[Path | str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        root: Path = ROOT,
        pipe: int = subprocess.DEVNULL,
    ) -> None:
        self._log, self._began = log, time.perf_counter()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*map(str, command)],
                cwd=root,
                env={**os.environ, **(environment or {})},
                stdin=pipe,
                stdout=file if pipe == subprocess.DEVNULL else pipe,
                stderr=file,
                bufsize=0,
            )
        self.pid = self._process.pid

    def _wait(self, ready: Callable[[], object]) -> None:
        try:
            while not ready():
                if self._process.poll() is not None or time.perf_counter() > self._began + START_S:
                    raise self._failure("did not start")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - self._began

    def _failure(self, what: str) -> BenchmarkError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return BenchmarkError(f"{self._log.stem} {what}: {last} ({self._log})")

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._await_end()

    def _await_end(self) -> None:
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Worker(Program):
    """A process of `benchmarks.worker`, which several may start at the same time."""

    def __init__(
        self,
        python: Path | str,
        module: str,
        arguments: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [python, "-m", "benchmarks.worker", module, *arguments]
        super().__init__(command, log, environment, pipe=subprocess.PIPE)
        self._left = b""

    @cached_property
    def about(self) -> dict[str, Any]:
        """The worker's description of itself, sent once it is ready. Raises `BenchmarkError`."""
        about: dict[str, Any] = self._answer()
        return about

    def call(self, command: str, **options: Any) -> Any:
        """The command's result. Raises `BenchmarkError`."""
        assert self.about is not None
        order = json.dumps({"command": command, "options": options}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.encode())
        except BrokenPipeError:
            raise self._failure("ended") from None
        return self._answer()

    def _answer(self) -> Any:
        out = self._process.stdout
        assert out is not None
        while b"\n" not in self._left:
            if not select.select([out], [], [], ANSWER_S)[0]:
                raise self._failure(f"said nothing for {ANSWER_S:.0f} s")
            if not (piece := out.read(1 << 16)):
                raise self._failure("ended")
            self._left += piece
        line, _, self._left = self._left.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self._log.stem}: {answer['error']} ({self._log})")
        return answer["result"]

    def close(self) -> None:
        """End the program by closing its input."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._await_end()
