"""`python -m benchmarks bench|profile|gpu-check`, which `kogpt2 bench` and the like start."""

from __future__ import annotations

import sys

from benchmarks import bench, profile
from benchmarks.gpu import check as gpu_check
from command import program

app = program.application("Measure this server beside others.")
program.add(app, "bench", bench.run)
program.add(app, "profile", profile.run)
program.add(app, "gpu-check", gpu_check.run)


def main(arguments: list[str] | None = None) -> int:
    return program.run(app, "kogpt2", arguments)


if __name__ == "__main__":
    sys.exit(main())
