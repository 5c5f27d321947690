"""Sends a file of JSON lines to a model and writes the answers to another file, line by line.

Several requests of a few lines each are in flight, so that a fleet's servers share them, and a
broken request costs a few lines only. What the output has already is not sent again.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from command.errors import Failed, Problem
from scripts.client.errors import CallFailed, NotReady
from scripts.client.prompt import Prompt
from scripts.client.targets import LINES, Call, open_target

JSON_LINES = LINES[1]
# Lines of a request. More: less work for this process; fewer: less is lost when a request fails.
MAX_LINES, MAX_BYTES = 32, 1 << 20
IN_FLIGHT = 4  # requests; a server works on some 15 lines of a model at a time
RETRIED = (0, 429, 500, 502, 503, 504)  # statuses; 0 is no or half an answer
MAX_PAUSE_S = 15.0
ERROR = b'{"error":'


def send_file(options: Prompt, model: str | None, source: Path, output: Path) -> int:
    """Answer the lines of `source` that `output` has no answer to; return the exit status.

    Requests that fail are repeated for `options.wait`. Raises `CallFailed`, `Problem`.
    """
    parameters = options.parameters_given()
    if output.exists() and source.exists() and output.samefile(source):
        raise Problem("--file and --out are the same file")
    try:
        total = sum(1 for _ in lines_of(source))
        answers = os.fdopen(os.open(output, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise Problem(f"cannot open {error.filename}: {error.strerror}") from None
    with answers:
        done = complete_lines(answers, output)
        if done > total:
            raise Problem(f"{output} has {done} answers, {source} only {total} lines: use another")
        sender = Sender(open_target(options), model, options.wait)
        bodies = (
            with_parameters(line, parameters) for line in islice(lines_of(source), done, None)
        )
        return _send(sender, bodies, answers, done, total)


def _send(sender: Sender, bodies: Iterator[bytes], answers: BinaryIO, done: int, total: int) -> int:
    from tqdm import tqdm

    began, errors = time.monotonic(), 0
    running: deque[Future[list[bytes]]] = deque()
    with (
        tqdm(total=total, initial=done, unit=" lines", disable=None) as bar,
        ThreadPoolExecutor(IN_FLIGHT) as pool,
    ):
        try:
            requests = requests_of(bodies)
            while True:
                for lines in islice(requests, 2 * IN_FLIGHT - len(running)):
                    running.append(pool.submit(sender.answers, lines))
                if not running:
                    break
                made = running.popleft().result()
                answers.write(b"".join(made))
                answers.flush()
                errors += sum(line.startswith(ERROR) for line in made)
                bar.update(len(made))
        finally:
            sender.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
    seconds, count = time.monotonic() - began, total - done
    earlier = f", {done} were answered before" if done else ""
    rate = f" ({count / seconds:.0f} a second)" if count else ""
    print(f"{count} lines in {seconds:.1f} s{rate}, {errors} errors{earlier}", file=sys.stderr)
    return 1 if errors else 0


class Sender:
    """Gets the answers to lines, in requests that are repeated where the server is busy."""

    def __init__(self, target: Any, model: str | None, wait_s: float) -> None:
        self._target, self._model, self._wait_s = target, model, wait_s
        self._connected = False  # before an answer, a server that is not there ends the command
        self.stopped = threading.Event()

    def answers(self, lines: list[bytes]) -> list[bytes]:
        """Return the answers to lines, each with its line end. Raises `CallFailed`, `Failed`."""
        answers: list[bytes] = []
        end, pause_s = time.monotonic() + self._wait_s, 0.5
        while len(answers) < len(lines):
            count = len(answers)
            try:
                for answer in self._call(lines[count:]):
                    answers.append(answer)
                if len(answers) < len(lines):
                    raise CallFailed("the server broke off its answer", kind="broken answer")
            except CallFailed as error:
                if len(answers) > count:
                    end, pause_s = time.monotonic() + self._wait_s, 0.5
                worth = isinstance(error, NotReady) or error.status in RETRIED
                if not (self._connected or error.status or isinstance(error, NotReady)):
                    worth = False
                if not worth or time.monotonic() + pause_s > end or self.stopped.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            if len(answers) > len(lines):
                raise Failed("the server sent more answers than it got lines")
        return answers

    def _call(self, lines: list[bytes]) -> Iterator[bytes]:
        rest = b""
        with self._target.call(Call(self._model, b"\n".join(lines), lines=True)) as answer:
            if answer.content_type.partition(";")[0].strip() not in LINES:
                raise Failed(f"the server answers {answer.content_type} instead of {JSON_LINES}")
            for chunk in answer.chunks:
                self._connected = True
                *complete, rest = (rest + chunk).split(b"\n")
                yield from (line + b"\n" for line in complete)
                if self.stopped.is_set():
                    raise Failed("the command was interrupted")


def lines_of(source: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank, without their line ends."""
    with source.open("rb") as file:
        for number, line in enumerate(file):
            content = line if number else line.removeprefix(b"\xef\xbb\xbf")
            if content := content.strip(b" \t\r\n"):
                yield content


def complete_lines(answers: BinaryIO, path: Path) -> int:
    """Return the number of lines in an output, after cutting off a last one without a line end.

    The file is locked and its position at its end. Raises `Problem` if another process has it.
    """
    try:
        fcntl.flock(answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Problem(f"another command writes {path}") from None
    count = end = 0
    while chunk := answers.read(MAX_BYTES):
        if newlines := chunk.count(b"\n"):
            count += newlines
            end = answers.tell() - len(chunk) + chunk.rfind(b"\n") + 1
    answers.truncate(end)
    answers.seek(end)
    return count


def with_parameters(line: bytes, parameters: dict[str, Any]) -> bytes:
    """Add parameters to a line with a prompt; the line's own have precedence."""
    if not parameters:
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line  # the server's answer names the fault
    if isinstance(value, str):
        value = {"inputs": value}
    if not isinstance(value, dict) or "inputs" not in value:
        return line
    given = value.get("parameters") or {}
    if not isinstance(given, dict):
        return line
    return json.dumps({**value, "parameters": {**parameters, **given}}).encode()


def requests_of(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Group lines to requests of at most `MAX_LINES` and about `MAX_BYTES`.

    The first ones are shorter: requests that begin together would end together, as the server
    shares its places among them, and leave it idle until the next ones arrive.
    """
    group: list[bytes] = []
    size = count = 0
    for line in lines:
        most = MAX_LINES * min(count + 1, IN_FLIGHT) // IN_FLIGHT
        if group and (len(group) == most or size + len(line) > MAX_BYTES):
            yield group
            group, size, count = [], 0, count + 1
        group.append(line)
        size += len(line)
    if group:
        yield group
