"""Runs pip for one model, confined: `python pip_child.py <pid> <JSON> <pip's arguments>`.

`pid` is the worker's; the JSON is a `Confinement` or null. pip may run code of the packages.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules would hide the standard library's

import json
import os
import runpy
from pathlib import Path

from handlers.user_code.confinement.rules import REPOSITORY, become_model_process


def main() -> None:
    become_model_process(int(sys.argv[1]), json.loads(sys.argv[2]))
    # pip treats every package on the path as installed.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != REPOSITORY]
    os.environ.pop("PYTHONPATH", None)
    sys.argv[:] = ["pip", *sys.argv[3:]]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
