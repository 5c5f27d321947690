from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.trees import remove
from tests.serving import virtual_time
from tests.serving.fakes import Parts

DEPTH = 1100


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual_time: a coroutine whose clock stands still")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine marked `virtual_time` runs in the loop of that module."""
    mark = pyfuncitem.get_closest_marker("virtual_time")
    if mark is None or False in mark.args or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    virtual_time.run(functools.partial(pyfuncitem.obj, **given))
    return True


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """A registry over fakes, with room for ten models and an empty store."""
    return Parts(tmp_path)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users reach; pytest's are closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


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
