"""Faults of a fleet under load, which are taken back."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
import requests

from tests.chaos.clients import Clients, Models
from tests.chaos.history import UNLOAD, Op
from tests.e2e.server import eventually
from tests.fleet.envoy import Envoy
from tests.fleet.fleet import SPARE, Fleet

NAMES = 300
HOT = "봄"
COLD = "영랑"  # the least popular model
CLIENTS = 8
CALLED = Models(("소월", "동주", "육사", "백석", "만해", COLD), (HOT,), 2, zipf=1)
Fault = Callable[[Fleet, Clients, random.Random], contextlib.AbstractContextManager[None]]


def _server(fleet: Fleet, chance: random.Random) -> str:
    """A server that has called models."""
    return fleet.home(chance.choice(CALLED.all))


def _shares(fleet: Fleet, clients: Clients) -> dict[str, str]:
    """The servers by hash alone, without load."""
    clients.pause()
    found = fleet.shares(NAMES)
    clients.resume()
    return found


def _moved_only(
    fleet: Fleet, with_it: dict[str, str], without: dict[str, str], server: str
) -> None:
    """Only its share of the names has another home without it; by Envoy's Maglev, a few more."""
    moved = {name for name, home in with_it.items() if without[name] != home}
    share = {name for name, home in with_it.items() if home == server}
    wrong = share - moved if isinstance(fleet.proxy, Envoy) else share ^ moved
    assert not wrong, {name: (without[name], with_it[name]) for name in wrong}
    servers = len(set(with_it.values()))
    print(f"{len(moved)} of {NAMES} moved, {len(moved) * servers / NAMES:.2f} / {servers}")
    assert 0 < len(moved) <= NAMES * 1.3 / servers


@contextlib.contextmanager
def killed(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    before = _shares(fleet, clients)
    with fleet.stream() as (victim, lines):
        fleet.kill(victim)
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            list(lines)
    fleet.proxy.wait_for(*fleet.others(victim))
    without = _shares(fleet, clients)
    yield
    fleet.start(victim)
    fleet.proxy.wait_for(*fleet.nodes)
    _moved_only(fleet, before, without, victim)
    assert _shares(fleet, clients) == before


@contextlib.contextmanager
def paused(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    victim = _server(fleet, chance)
    processes = fleet.processes(victim)
    for process in processes:
        process.suspend()
    try:
        fleet.proxy.wait_for(*fleet.others(victim))
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@contextlib.contextmanager
def parted_from_proxy(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    with fleet.stream() as (victim, lines), fleet.hosts[victim].parted_from(fleet.gate.address):
        fleet.proxy.wait_for(*fleet.others(victim))
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            list(lines)
        yield


@contextlib.contextmanager
def parted_from_store(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    """Another server answers for the one that cannot load a model."""
    clients.pause()  # so that the call goes by hash alone
    with _no_store(fleet, clients, fleet.home(COLD)) as call:
        assert call.result().status == 200
        clients.resume()
        yield


@contextlib.contextmanager
def store_gone(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    """A call of a model that is not loaded waits for the store."""
    clients.pause()  # a DELETE that ends a load is a 409 for the calls that wait for it
    with _no_store(fleet, clients, *fleet.nodes) as call:
        clients.resume()
        yield
        assert not call.done()
    assert call.result().status == 200


@contextlib.contextmanager
def _no_store(fleet: Fleet, clients: Clients, *names: str) -> Iterator[Future[Op]]:
    """Parts these servers from the store and calls a model that they have to load."""
    port = int(fleet.s3.url.rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        for name in names:
            host = fleet.hosts[name]
            stack.enter_context(host.parted_from(fleet.network.address, port))
            fleet.unload(name, COLD)
        yield pool.submit(clients.ask, CLIENTS, "predictions", COLD)


@contextlib.contextmanager
def slow(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    with fleet.hosts[_server(fleet, chance)].slow():
        yield


@contextlib.contextmanager
def replaced(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    """Puts a new version into the store and unloads the old one everywhere; all answer with the new
    one then."""
    eventually(lambda: sum(HOT in fleet.loaded(name) for name in fleet.nodes) > 1)
    clients.replace(-1, f"replaced-{HOT}", HOT)
    begin = time.monotonic()
    for name in fleet.nodes:
        fleet.unload(name, HOT)
    unload = Op(f"unloaded-{HOT}", -1, UNLOAD, HOT, begin, time.monotonic(), 200)
    clients.ops.append(unload)
    yield


@contextlib.contextmanager
def another_comes_and_goes(fleet: Fleet, clients: Clients, chance: random.Random) -> Iterator[None]:
    before = _shares(fleet, clients)
    fleet.start(SPARE)
    fleet.haproxy.reload(1, 2, 3, 4)
    fleet.proxy.wait_for(*fleet.nodes)
    with_it = _shares(fleet, clients)
    _moved_only(fleet, with_it, before, SPARE)
    yield
    gone = chance.randrange(1, 4)
    fleet.haproxy.reload(*(number for number in range(1, 5) if number != gone))
    without = _shares(fleet, clients)
    _moved_only(fleet, with_it, without, f"node{gone}")
    fleet.haproxy.reload(1, 2, 3, 4)
    assert fleet.nodes.pop(SPARE).stop() == 0  # while the proxy still has it
    fleet.proxy.wait_for(*fleet.nodes)
    fleet.haproxy.reload(1, 2, 3)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        killed, paused, parted_from_proxy, parted_from_store, store_gone, slow, replaced,
        another_comes_and_goes,
    )
}  # fmt: skip
