"""What a person sees while a command works: a line per phase, and waits that move."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape

from scripts.lib.problem import Problem

FIRST_POLL_S, LONGEST_POLL_S = 0.5, 10.0
LINE_EVERY_S = 60.0


class Phase:
    """`result` is what its line says."""

    def __init__(self) -> None:
        self.result = "done"


@contextlib.contextmanager
def phase(name: str, dry_run: bool = False) -> Iterator[Phase]:
    """Prints the phase's name, its result and the elapsed time when it ends.

    In a dry run nothing has a result: there the calls are what is printed.
    """
    began = time.monotonic()
    current = Phase()
    try:
        yield current
    except BaseException:
        print(f"{name:<14} not done after {time.monotonic() - began:.1f} s", flush=True)
        raise
    if not dry_run:
        print(f"{name:<14} {current.result}, {time.monotonic() - began:.1f} s", flush=True)


def wait(what: str, state: Callable[[], str], busy: tuple[str, ...], limit_s: float) -> str:
    """The first state that is not busy. On a terminal one line counts the seconds.

    Raises `Problem` after `limit_s`.
    """
    began, poll_s, said_s = time.monotonic(), FIRST_POLL_S, 0.0
    console = Console(stderr=True)
    with console.status(what) as line:
        while (now := state()) in busy:
            elapsed_s = time.monotonic() - began
            if elapsed_s > limit_s:
                raise Problem(
                    f"{what} is still {now} after {elapsed_s:.0f} s; run this again to wait on"
                )
            said = f"{what}: {now}, {elapsed_s:.0f} s"
            line.update(escape(said))
            if not console.is_terminal and elapsed_s >= said_s:
                print(said, file=sys.stderr, flush=True)
                said_s += LINE_EVERY_S
            time.sleep(poll_s)
            poll_s = min(LONGEST_POLL_S, poll_s * 1.5)
    return now


def mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
