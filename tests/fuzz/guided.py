"""Feeds hostile inputs to one parser, guided by the coverage of its branches.

python -m tests.fuzz.guided --minutes 5 npy        (pip install atheris==3.0.0)

It ends at a defect as `python -m tests.fuzz` does. Atheris sees our packages' bytecode, not C.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["common", "engine", "handlers", "serving"]):
    from tests.fuzz.__main__ import MEASURED, tried
    from tests.fuzz.cases import MOST_BYTES, seeds
    from tests.fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="parser", choices=TARGETS, help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=1.0)
    given = parser.parse_args()
    count = itertools.count()

    def attempt(data: bytes) -> None:
        tried(given.name, bytes(data), measured=next(count) % MEASURED == 0)

    with TemporaryDirectory() as folder:
        for i, seed in enumerate(seeds(given.name)):
            (Path(folder) / str(i)).write_bytes(seed)
        options = [f"-max_total_time={given.minutes * 60:.0f}", f"-max_len={MOST_BYTES}", folder]
        atheris.Setup([sys.argv[0], *options], attempt)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
