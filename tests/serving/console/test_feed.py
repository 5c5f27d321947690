"""The events that an open console gets, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serving.aliases import Alias
from serving.console.feed import MAX_WATCHERS, SAMPLE_S, STORE_S, Feed
from serving.errors import Unavailable
from tests.serving.fakes import Parts

pytestmark = pytest.mark.virtual_time


class CountingEngine:
    """Makes 30 tokens a second for every model that it has, and knows how often it was asked."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self.asked = parts, 0

    async def statistics(self, timeout_s: float) -> dict[str, Any]:
        self.asked += 1
        made = {
            "tokens": round(30 * asyncio.get_running_loop().time()),
            "residency": "parked",
            "held_bytes": 100,
            "running": 2,
            "waiting": 1,
            "time_to_first_token_s": {"buckets": [["+Inf", 4]], "sum": 1.0},
        }
        models = [{"name": name, **made} for name in self._parts.workers.in_engine]
        totals = {
            "budget_bytes": 1000,
            "weight_bytes": 100 * len(models),
            "kv_bytes": 0,
            "prefix_bytes": 0,
        }
        return {**totals, "models": models}


def feed_of(parts: Parts, engine: CountingEngine) -> Feed:
    return Feed(parts.gateway(mms=None, engine=engine, lookups=parts.lookups))


async def test_a_row_has_the_aliases_that_its_watcher_may_see(tmp_path: Path) -> None:
    parts = Parts(tmp_path, names=("봄", "여름"))
    feed = feed_of(parts, CountingEngine(parts))
    names = {"고객": {"봄": 3, "여름": 1}, "시": {"봄": 1}}
    feed._gateway.aliases._take({name: Alias(name, of) for name, of in names.items()})
    for model in ("봄", "여름"):
        await parts.on_demand.ensure(model)
    async for message in feed.watch(lambda name: name != "시"):
        shown = {name: row.get("aliases") for name, row in message["models"].items()}
        assert shown == {"봄": ["고객"], "여름": ["고객"]}
        break
    async for message in feed.watch():
        assert message["models"]["봄"]["aliases"] == ["고객", "시"]
        break


async def test_a_row_says_nothing_of_a_base_that_its_watcher_may_not_see(tmp_path: Path) -> None:
    parts = Parts(tmp_path, names=("봄", "바탕"))
    feed = feed_of(parts, CountingEngine(parts))
    await parts.on_demand.ensure("봄")
    model, reason = parts.registry.get("봄"), "its base 바탕 has 6 layers"
    model.stored_base, model.whole_because = await parts.lookups.find("바탕"), reason
    for sees_base, shown in ((True, reason), (False, "")):
        async for message in feed.watch(lambda name, sees=sees_base: sees or name != "바탕"):
            assert message["models"]["봄"]["whole_because"] == shown
            break


async def test_who_watches_gets_everything_first_and_then_what_has_changed(tmp_path: Path) -> None:
    parts = Parts(tmp_path, names=("봄", "여름"))
    engine = CountingEngine(parts)
    feed = feed_of(parts, engine)
    kept: list[list[dict[str, Any]]] = [[], []]

    async def watch(messages: list[dict[str, Any]]) -> None:
        async for message in feed.watch():
            messages.append(message)

    watching = [asyncio.create_task(watch(messages)) for messages in kept]
    await asyncio.sleep(3)
    await parts.load("봄")
    await asyncio.sleep(3)
    await parts.registry.unload("봄")
    parts.lookups.names.remove("여름")
    await asyncio.sleep(STORE_S + 1)
    for task in watching:
        task.cancel()
    assert kept[0] == kept[1]
    assert engine.asked <= asyncio.get_running_loop().time() / SAMPLE_S + 1  # once for both
    first, *later = kept[0]
    assert first["whole"] is True
    assert not any("whole" in message for message in later)
    changes = [(n, row) for m in kept[0] for n, row in m["models"].items()]
    states = [row and row["state"] for name, row in changes if name == "봄"]
    assert [s for i, s in enumerate(states) if i == 0 or states[i - 1] != s] == [
        "stored", "fetching", "loading", "ready", "draining", "stored",
    ]  # fmt: skip
    ready = [row for name, row in changes if name == "봄" and row["state"] == "ready"][-1]
    assert (ready["residency"], ready["tokens_s"], ready["first_token_s"]) == ("parked", 30, 0.25)
    assert changes[-1] == ("여름", None)  # no longer in the store
    told = [(e["event"], e["model"]) for m in kept[0] for e in m["journal"]]
    assert told == [("loaded", "봄"), ("unloaded", "봄")]
    assert max(rate for m in kept[0] for _, rate in m.get("pace", [])) == 30


async def test_only_so_many_may_watch(tmp_path: Path) -> None:
    feed = feed_of(parts := Parts(tmp_path), CountingEngine(parts))
    watching = [feed.watch() for _ in range(MAX_WATCHERS)]
    for messages in watching:
        await anext(messages)
    with pytest.raises(Unavailable, match="32 console pages are open"):
        feed.check_watchers()
    await watching[0].aclose()
    feed.check_watchers()
