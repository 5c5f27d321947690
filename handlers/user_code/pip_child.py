"""pip for one model, which may run code of the packages: `python pip_child.py <pid> <JSON> ...`.

The worker's pid, a `Confinement` or null, and pip's arguments.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # the folder of this file: its modules would stand in for Python's own

import json
import os
import runpy
from pathlib import Path

from handlers.user_code.confinement.rules import REPOSITORY, Confinement, belong_to


def main() -> None:
    worker, confinement = int(sys.argv[1]), json.loads(sys.argv[2])
    belong_to(worker, Confinement(**confinement) if confinement else None)
    # It looks for packages everywhere on the path, and what it starts needs none of ours.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != REPOSITORY]
    os.environ.pop("PYTHONPATH", None)
    sys.argv[:] = ["pip", *sys.argv[3:]]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
