"""A measured process, seen from the script: started, asked, ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.problem import Failed

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
CALL_S = 300.0
STOP_S = 10.0


class BenchmarkError(Failed):
    """Something could not be measured; the message says what and why."""


class Process:
    """`python -m benchmarks.MODULE arguments` with the given interpreter.

    It has this process's cores. `about` is what it says of itself once it is ready.
    """

    def __init__(
        self,
        python: Path | str,
        module: str,
        arguments: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._log = module, log
        command = [str(python), "-m", f"benchmarks.{module}", *map(str, arguments)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
            )
        self._left = b""
        try:
            self.about: dict[str, Any] = self._answer(START_S)
        except BenchmarkError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, command: str, **options: Any) -> Any:
        """The command's result. Raises `BenchmarkError`."""
        order = json.dumps({"command": command, "options": options}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.encode())
        except BrokenPipeError:
            raise self._failure("ended") from None
        return self._answer(CALL_S)

    def _answer(self, timeout_s: float) -> Any:
        out = self._process.stdout
        assert out is not None
        while b"\n" not in self._left:
            ready, _, _ = select.select([out], [], [], timeout_s)
            if not ready:
                raise self._failure(f"said nothing for {timeout_s:.0f} s")
            piece = out.read(1 << 16)
            if not piece:
                raise self._failure("ended")
            self._left += piece
        line, _, self._left = self._left.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self.name}: {answer['error']} ({self._log})")
        return answer["result"]

    def _failure(self, what: str) -> BenchmarkError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return BenchmarkError(f"{self.name} {what}: {last} ({self._log})")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        await_end(self._process, STOP_S)


def await_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits so long for a process that was told to end, and then kills it."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
