from __future__ import annotations

import asyncio
import gc
import inspect
import sys

import pytest

# What pytest makes of the tests' modules is kept, also where PYTHONDONTWRITEBYTECODE is set: to
# rewrite their asserts takes half of the collection, in each worker. Programs that tests start keep
# none still.
sys.dont_write_bytecode = False

# What the collection makes stays, so nothing is searched for garbage before its end: a second.
gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a path, `-m` or `-k` only the quick tests run."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    if config.option.markexpr or config.option.keyword:
        return
    slow = [
        i for i in items if {m.name for m in i.iter_markers()} & {"slow", "oracle", "container"}
    ]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in {*slow}]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own, for a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, 60))
    return True
