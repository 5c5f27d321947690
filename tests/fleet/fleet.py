"""Servers in network namespaces behind the real HAProxy, on one S3 store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import requests

from testbed import process_tree, random_model
from testbed.haproxy import Proxy
from tests.e2e.server import Server, eventually
from tests.e2e.stores import ENDLESS, FAST, small
from tests.e2e.test_metrics import metrics
from tests.engine.models import make_artifact
from tests.fleet.envoy import Envoy
from tests.fleet.haproxy import HAProxy
from tests.fleet.network import Host, Network
from tests.fleet.upstream import SERVED_BY, names
from tests.processes import kill_at_once
from tests.serving.store.s3 import BUCKET, S3Server

MODELS, FITTING = 40, 10
LENGTHY = "긴시"
MEMORY_MIB = {FITTING: 17, 3 * FITTING: 51}  # for so many of `small`
PORT = 8080
SPARE = "node4"  # not started, and not on the ring


def model(number: int) -> str:
    return f"시{number}"


def fill(s3: S3Server, folder: Path) -> None:
    """Puts the models into the store, and one that takes seconds for `ENDLESS`."""
    for number in range(MODELS):
        _put(s3, model(number), small(folder / str(number), number))
    long = make_artifact(folder / "long", layers=2, units=32, vocab=160, max_length=8192)
    _put(s3, LENGTHY, long)


def _put(s3: S3Server, name: str, artifact: Path) -> None:
    packed = random_model.pack(artifact, artifact.with_suffix(".tar.gz"))
    s3.put(f"{name}.tar.gz", packed.read_bytes())


def environment(s3: S3Server, models: int) -> dict[str, str]:
    """The settings of a server with memory for so many models."""
    return {
        **FAST,
        **s3.environment,
        "MODEL_STORE": f"s3://{BUCKET}",
        "ENGINE_MEMORY_MIB": str(MEMORY_MIB[models]),
        "ENGINE_OVERCOMMIT": "1",
        "DRAIN_S": "25",
    }


def loads(server: Server) -> int:
    """Count the models that the server has loaded since its start."""
    seen = metrics(server)
    evicted = seen.get(("kogpt2_model_idle_at_eviction_seconds_count",), 0)
    return int(evicted + seen["kogpt2_models",])


class Fleet:
    """`nodes`: the servers on the ring by name. A context manager."""

    def __init__(self, folder: Path, s3: S3Server, network: Network) -> None:
        self._folder, self.s3, self.network = folder, s3, network
        self.hosts = {name: network.host(name) for name in (*names(3), SPARE)}
        self.gate: Host = network.host("proxy")
        self._groups = contextlib.ExitStack()
        self.nodes: dict[str, Server] = {}
        self.haproxy: HAProxy
        self.proxy: Proxy  # in front of the servers

    def __enter__(self) -> Fleet:
        for name in names(3):
            self._start(name)
        for server in self.nodes.values():
            server.wait_until_ready()
        addresses = [f"{host.address}:{PORT}" for host in self.hosts.values()]
        self.haproxy = HAProxy(self._folder, addresses, self.gate.address, self.gate.prefix)
        self.proxy = self.haproxy
        self.proxy.wait_for(*self.nodes)
        return self

    def __exit__(self, *_: object) -> None:
        self.haproxy.close()
        for server in self.nodes.values():
            if server.process.poll() is None:
                server.stop()
        self._groups.close()

    @contextlib.contextmanager
    def behind_envoy(self) -> Iterator[None]:
        """Envoy in the place of HAProxy, which goes on unused."""
        addresses = [f"{self.hosts[name].address}:{PORT}" for name in names(3)]
        with Envoy(self._folder, addresses, self.gate.address, self.gate.prefix) as self.proxy:
            try:
                self.proxy.wait_for(*self.nodes)
                yield
            finally:
                self.proxy = self.haproxy

    def _start(self, name: str) -> None:
        folder = self._folder / name / str(time.monotonic_ns())
        folder.mkdir(parents=True)
        host, settings = self.hosts[name], environment(self.s3, FITTING)
        prefix = self._groups.enter_context(host.limited())
        self.nodes[name] = Server(
            folder, None, settings, port=PORT, host=host.address, prefix=prefix
        )

    def start(self, name: str) -> None:
        """Starts a server, perhaps in the place of one that has ended."""
        self._start(name)
        self.nodes[name].wait_until_ready()

    def others(self, name: str) -> set[str]:
        return self.nodes.keys() - {name}

    def restore(self) -> None:
        """Has three servers up again."""
        if spare := self.nodes.pop(SPARE, None):
            spare.stop()
            self.haproxy.reload(1, 2, 3)
        for name, server in self.nodes.items():
            if server.process.poll() is not None:
                self.start(name)
        self.proxy.wait_for(*self.nodes)

    def processes(self, name: str) -> list[psutil.Process]:
        return process_tree.processes(self.nodes[name].process.pid)

    def kill(self, name: str) -> None:
        kill_at_once(self.nodes[name].process.pid)
        self.nodes[name].process.wait()

    def loaded(self, name: str) -> list[str]:
        return self.nodes[name].loaded()

    def unload(self, name: str, model: str) -> None:
        assert self.nodes[name].unload(model).status_code in (200, 404)

    @contextlib.contextmanager
    def stream(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """A long stream: its server, and the lines after the first. The engine is suspended
        meanwhile, so that the stream does not end."""
        engines = {name: node.descendants("-m engine ")[0] for name, node in self.nodes.items()}
        url = self.proxy.url(f"/predictions/{LENGTHY}")
        body = {**ENDLESS, "stream": True}
        with requests.post(url, json=body, timeout=90, stream=True) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(b"data: "), answer.status_code
            engine = engines[answer.headers[SERVED_BY]]
            engine.suspend()
            try:
                yield answer.headers[SERVED_BY], lines
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.resume()

    def home(self, model: str, session: requests.Session | None = None) -> str:
        """The server that the proxy routes a model to."""
        url = self.proxy.url(f"/v2/models/{model}/ready")
        return (session or requests).get(url, timeout=60).headers[SERVED_BY]

    def shares(self, count: int) -> dict[str, str]:
        """The servers of so many names, which are no models', so that nothing is loaded.

        By hash alone, once the proxy has no request in flight: a client that has hung up is gone
        before the proxy notices, and one request more makes a server too busy for its names."""
        eventually(lambda: self.proxy.in_flight() == 0)
        with requests.Session() as session:
            return {name: self.home(f".{name}", session) for name in map(str, range(count))}
