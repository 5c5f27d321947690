"""Starts programs under test as processes, waits until they are ready, and ends them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from command.errors import Failed
from common.errors import EngineError

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0
LOG_LINES = 3  # in the error of a program that does not start: what ended, and why
STOP_S = 15.0

P = TypeVar("P", bound="Program")


class ProgramError(Failed):
    """A program or a measurement failed. The message names it and gives the reason."""


def fetch(url: str, timeout_s: float) -> bytes:
    """Send a request to a program on this machine, past any proxy that the environment names.

    Raises `OSError`.
    """
    past_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with past_proxies.open(url, timeout=timeout_s) as answer:
        content: bytes = answer.read()
        return content


PORTS = range(10_000, 32_000)  # below the kernel's for clients; Multi Model Server takes <= 32767
SHARES = 32  # processes that have ports of their own, 687 each


@functools.cache
def _ports() -> Iterator[int]:
    """Return the ports of this process, in an endless cycle.

    So no two tests, also of two runs at once, get a port that is free only because its server has
    not bound it yet. A share belongs to the process that has bound its abstract unix address.
    """
    for share in range(SHARES):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kogpt2-ports-{share}")
        except OSError:
            claim.close()
        else:
            claim.detach()  # open until this process ends
            break
    else:
        share = random.SystemRandom().randrange(SHARES)
    ports = PORTS[share::SHARES]
    return itertools.cycle(random.SystemRandom().sample(ports, len(ports)))


def free_port() -> int:
    """Return a free port of `PORTS`."""
    for port in itertools.islice(_ports(), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ProgramError("no port is free between 10000 and 32000")


class Program:
    """A child process that writes to `log`; a context manager that ends it.

    ready_s: seconds from the start until the condition of `_wait` held
    """

    # The default, as in the image. Quick runs set "native", which starts sooner.
    backend: ClassVar[str] = "mxnet"
    ready_s: float

    def __init__(
        self,
        command: Sequence[Path | str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        root: Path = ROOT,
        pipe: int = subprocess.DEVNULL,
    ) -> None:
        self.log, self._began = log, time.perf_counter()
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
            self._until(ready, "did not start", START_S)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - self._began

    def _until(self, condition: Callable[[], object], failure: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError, EngineError):  # the program does not answer yet
                if condition():
                    return
            if self._process.poll() is not None or time.monotonic() > end:
                raise self._failure(failure)
            time.sleep(0.02)

    def _failure(self, what: str) -> ProgramError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [line for line in lines if line.strip()][-LOG_LINES:]
        head = f"{self.log.stem} {what}; {self.log} ends with:"
        return ProgramError("\n".join([head, *last]))

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
