from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.trees import remove

DEPTH = 1500


@pytest.fixture
def deep() -> Iterator[Callable[[Path], None]]:
    """Makes trees that are deeper than Python's stack and longer than a path may be, and removes
    what is left of them: pytest could not."""
    made: list[Path] = []

    def make(root: Path) -> None:
        made.append(root)
        root.mkdir()
        at = os.open(root, os.O_RDONLY)
        for _ in range(DEPTH):
            os.mkdir("깊이", dir_fd=at)
            below = os.open("깊이", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.close(at)

    yield make
    for root in made:
        remove(root)
