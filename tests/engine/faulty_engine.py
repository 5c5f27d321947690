"""`python -m engine` whose reader crashes, loops or takes all memory where an artifact says so."""

from __future__ import annotations

import sys

from engine.__main__ import main
from engine.prepared import manifest
from tests.engine.sandbox import targets

if __name__ == "__main__":
    manifest.read = targets.read
    manifest.READ_CPU_S = 2
    sys.exit(main())
