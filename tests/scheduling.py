"""Distribute the quick tests over xdist's workers: a plugin of scripts/test."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Files that share a server of the session. A start takes 5 s of CPU, which each worker would spend.
# The slow tests take too long for one worker.
ONE_WORKER = ("tests/e2e/", "tests/scripts/test_")


class Scheduling(LoadFileScheduling):
    """Runs a file's tests on one worker, and so those of files that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((files for files in ONE_WORKER if file.startswith(files)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)
