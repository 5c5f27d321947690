from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from serving.models.startup import watch_health

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]
)
async def test_a_machine_that_is_short_of_files_or_threads_is_ill_until_it_has_some(
    error: Exception,
) -> None:
    short = True

    async def call(*_: Any, **__: Any) -> None:
        if short:
            raise error

    async def is_healthy() -> bool:
        return True

    gateway: Any = SimpleNamespace(
        healthy=True,
        takes_over=False,
        mms=SimpleNamespace(call=call),
        engine=SimpleNamespace(is_healthy=is_healthy),
    )
    watching = asyncio.create_task(watch_health(gateway))
    await asyncio.sleep(2)
    assert not gateway.healthy
    short = False
    await asyncio.sleep(2)
    assert gateway.healthy
    assert not watching.done()
    watching.cancel()
