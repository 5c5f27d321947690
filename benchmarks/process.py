"""Worker processes, also of other environments, that measure themselves on command."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from testbed.process import Program, ProgramError

WORKDIR = Path(tempfile.gettempdir()) / "kogpt2-benchmark"
ANSWER_S = 300.0


class Worker(Program):
    """A process of `benchmarks.worker`; the constructor does not wait until it is ready."""

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
        """The worker's description of itself, sent once it is ready. Raises `ProgramError`."""
        about: dict[str, Any] = self._answer()
        return about

    def call(self, command: str, **options: Any) -> Any:
        """Run a command in the worker and return its result. Raises `ProgramError`."""
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
                raise self._failure(f"gave no output for {ANSWER_S:.0f} s")
            if not (chunk := out.read(1 << 16)):
                raise self._failure("ended")
            self._left += chunk
        line, _, self._left = self._left.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise ProgramError(f"{self.log.stem}: {answer['error']} ({self.log})")
        return answer["result"]

    def close(self) -> None:
        """End the program by closing its input."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._await_end()
