"""Feeds hostile inputs to every parser of foreign bytes, or hostile requests to a server.

python -m tests.fuzz --minutes 10              all of them in turn
python -m tests.fuzz --minutes 10 npy torch    these
python -m tests.fuzz --server --minutes 10     a server of its own, by requests
python -m tests.fuzz.guided npy                with coverage as the guide

It ends at the first defect, and names the file with the input: `python -m tests.fuzz npy --file F`
repeats it. As a new file in tests/fuzz/corpus/npy it is a test.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz import live
from tests.fuzz.cases import case, seeds
from tests.fuzz.lasting import Lasting
from tests.fuzz.targets import TARGETS, attempt

ROUND = 200
MEASURED = 20  # one in so many has its memory measured
STALL_S = 5.0  # of one input
SHOWN_EVERY_S = 30.0


def tried(name: str, data: bytes, measured: bool = True) -> bool:
    """Whether the input is accepted. Writes a defect's input into a file and raises the error."""
    began = time.process_time()
    try:
        taken = attempt(TARGETS[name], data, measured)
        assert time.process_time() - began < STALL_S, "it took too long"
    except BaseException:
        path = Path(f"fuzz-{name}")
        path.write_bytes(data)
        print(f"{name}: the input is in {path.absolute()}", file=sys.stderr)
        raise
    return taken


def run(names: list[str], minutes: float, seed: int) -> None:
    rng, known = random.Random(seed), {name: seeds(name) for name in names}  # noqa: S311
    counts = {name: [0, 0] for name in names}
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        for name in names:
            for i in range(ROUND):
                data = case(rng, known[name])
                counts[name][tried(name, data, measured=i % MEASURED == 0)] += 1
                if time.monotonic() > end:
                    break
    print(f"seed {seed}, no defect\n{'parser':16}{'taken':>10}{'refused':>10}")
    for name, (refused, taken) in counts.items():
        print(f"{name:16}{taken:10}{refused:10}")


def against_a_server(minutes: float, seed: int, clients: int) -> None:
    """Raises `AssertionError` at the first wrong answer."""
    with TemporaryDirectory() as folder, live.served(Path(folder)) as server:
        lasting, ended = Lasting(server, Path(folder)), threading.Event()
        hostile = [live.Client(server, seed + i) for i in range(clients)]
        end = time.monotonic() + 60 * minutes

        def ask(client: live.Client) -> None:
            while time.monotonic() < end and not ended.is_set():
                client.ask()
            client.close()

        with ThreadPoolExecutor(clients + 1) as pool:
            beside = pool.submit(live.neighbour, server, ended)
            working = {pool.submit(ask, client) for client in hostile}
            try:
                while working:
                    done, working = wait(working, SHOWN_EVERY_S, FIRST_EXCEPTION)
                    for one in done:
                        one.result()
                    lasting.check_memory()
                    statuses = sum((client.statuses for client in hostile), Counter[int]())
                    print(f"{statuses.total()} requests", file=sys.stderr)
                ended.set()
                lasting.check(alone=clients == 1)
            except BaseException:
                log = Path("fuzz-server.log")
                log.write_text(server.text(), encoding="utf-8")
                print(f"seed {seed}: the server's log is in {log.absolute()}", file=sys.stderr)
                raise
            finally:
                ended.set()
    print(f"seed {seed}: {statuses.total()} requests, by status {dict(sorted(statuses.items()))}")
    print(f"a model beside: {beside.result()} answers, all right")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="parser", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--server", action="store_true", help="requests to a running server")
    parser.add_argument("--clients", type=int, default=4, help="of that server, at once")
    parser.add_argument("--file", type=Path, help="one parser, this input alone")
    given = parser.parse_args()
    unknown = set(given.names) - TARGETS.keys()
    if unknown or (given.file and len(given.names) != 1):
        parser.error(f"name {'one of ' if not unknown else ''}{', '.join(TARGETS)}")
    if given.file:
        print("taken" if tried(given.names[0], given.file.read_bytes()) else "refused")
    elif given.server:
        against_a_server(given.minutes, given.seed, given.clients)
    else:
        run(given.names or [*TARGETS], given.minutes, given.seed)


if __name__ == "__main__":
    main()
