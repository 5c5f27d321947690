"""The console's journal of models, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import ArtifactError
from serving.console.journal import MAX_ENTRIES
from tests.serving.fakes import Parts

pytestmark = pytest.mark.virtual_time


def told(parts: Parts) -> list[tuple[str, str]]:
    return [(entry.event, entry.model) for entry in parts.journal.entries]


async def test_the_journal_has_what_happened_to_models_and_why_one_failed(tmp_path: Path) -> None:
    parts = Parts(tmp_path, budget=200, names=("봄", "여름", "가을"))
    parts.workers.errors["봄"] = [ArtifactError("가중치가 없습니다")]
    with pytest.raises(ArtifactError):
        await parts.load("봄")
    assert told(parts) == [("failed", "봄")]
    assert parts.journal.failed == {"봄": "가중치가 없습니다"}
    for name in ("봄", "여름", "가을"):
        async with parts.on_demand.use(name):
            pass
        await asyncio.sleep(1)
    assert parts.journal.failed == {}  # it was loaded since
    events = told(parts)[1:]
    assert events[:2] == [("loaded", "봄"), ("loaded", "여름")]
    assert events[2:] == [("evicted", "봄"), ("unloaded", "봄"), ("loaded", "가을")]
    evicted = next(e for e in parts.journal.entries if e.event == "evicted")
    assert evicted.seconds is not None
    assert evicted.seconds >= 1  # how long it had been idle


async def test_the_journal_forgets_what_is_old(parts: Parts) -> None:
    for _ in range(MAX_ENTRIES):
        await parts.load("a")
        await parts.registry.unload("a")
    assert len(parts.journal.entries) == MAX_ENTRIES
