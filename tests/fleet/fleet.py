"""Three real servers behind the real proxy, on one S3 store, as compose.fleet.yaml has them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import requests

from tests.e2e.server import Server, eventually
from tests.e2e.stores import FAST, LONG, SHORT, small
from tests.e2e.test_metrics import metrics
from tests.engine.models import make_artifact
from tests.fleet.haproxy import HAProxy
from tests.fleet.upstream import SERVED_BY, names
from tests.serving.store.s3 import BUCKET, S3Server, archive

MODELS, ROOM = 40, 10
LONG_WINDED = "긴시"
ROOM_MIB = {ROOM: 17, 3 * ROOM: 51}  # of `small`


def model(number: int) -> str:
    return f"시{number}"


def fill(s3: S3Server, folder: Path) -> None:
    """With the models, and one that takes a second and more for `LONG`."""
    for number in range(MODELS):
        _put(s3, model(number), small(folder / str(number), number))
    long = make_artifact(folder / "long", layers=2, units=128, vocab=160, max_length=2048)
    _put(s3, LONG_WINDED, long)


def _put(s3: S3Server, name: str, artifact: Path) -> None:
    packed = archive({file.name: file.read_bytes() for file in artifact.iterdir()}, 0)
    s3.put(f"{name}.tar.gz", packed)


def node(folder: Path, s3: S3Server, room: int, port: int | None = None) -> Server:
    """A server with room for so many of the models; it is not ready yet."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **FAST,
        **s3.environment,
        "MODEL_STORE": f"s3://{BUCKET}",
        "ENGINE_MEMORY_MIB": str(ROOM_MIB[room]),
        "ENGINE_OVERCOMMIT": "1",
        "DRAIN_S": "25",
    }
    return Server(folder, None, environment, port=port)


def loads(server: Server) -> int:
    """How many it has made since it was started."""
    seen = metrics(server)
    evicted = seen.get(("kogpt2_model_idle_at_eviction_seconds_count",), 0)
    return int(evicted + seen["kogpt2_models",])


class Fleet:
    def __init__(self, folder: Path, s3: S3Server) -> None:
        self._folder, self._s3 = folder, s3
        self.nodes = {name: self._start(name) for name in names(3)}
        for server in self.nodes.values():
            server.wait_until_ready()
        self.proxy = HAProxy(folder, [server.port for server in self.nodes.values()])
        self.proxy.wait_for(*self.nodes)

    def _start(self, name: str, port: int | None = None) -> Server:
        return node(self._folder / name / str(time.monotonic_ns()), self._s3, ROOM, port)

    def kill(self, name: str) -> None:
        """As the kernel or a machine that goes ends it: every process, at once."""
        process = psutil.Process(self.nodes[name].process.pid)
        for killed in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                killed.kill()
        self.nodes[name].process.wait()

    @contextlib.contextmanager
    def stream(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Which server answers with a long stream, and the lines after its first. The engine is
        suspended meanwhile, so that the stream does not end before the server is killed."""
        engines = {name: node.descendants("-m engine ")[0] for name, node in self.nodes.items()}
        url = self.proxy.url(f"/predictions/{LONG_WINDED}")
        body = {**LONG, "stream": True}
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

    def start(self, name: str) -> None:
        """One in the place of one that has ended."""
        self.nodes[name] = self._start(name, self.nodes[name].port).wait_until_ready()

    def restore(self) -> None:
        """Starts those that have ended."""
        for name, server in self.nodes.items():
            if server.process.poll() is not None:
                self.start(name)
        self.proxy.wait_for(*self.nodes)

    def stop(self) -> None:
        self.proxy.stop()
        for server in self.nodes.values():
            if server.process.poll() is None:
                server.stop()

    def shares(self, count: int) -> dict[str, str]:
        """Of so many names which server is asked for each. They are no models' names, so that
        nothing is loaded."""
        with requests.Session() as session:
            answers = {
                name: session.get(self.proxy.url(f"/v2/models/.{name}/ready"), timeout=60)
                for name in map(str, range(count))
            }
        assert {answer.status_code for answer in answers.values()} == {400}
        return {name: answer.headers[SERVED_BY] for name, answer in answers.items()}


class Clients:
    """Some that ask the proxy for models as long as this is entered; `answers` are their statuses,
    or `wrong`, or `lost`, and `begun` is what ended a stream that had begun."""

    def __init__(
        self,
        proxy: HAProxy,
        expected: dict[str, str],
        asked: Sequence[int],
        *,
        count: int = 16,
        streams: int = 0,
    ) -> None:
        self._proxy, self._expected, self._asked = proxy, expected, asked
        self._stop, self._turn, self._next = threading.Event(), threading.Lock(), 0
        self._count, self._streams = count, streams
        self.answers, self.begun = Counter[int | str](), Counter[str]()
        self.served = Counter[tuple[str, str]]()
        self.longest_s = 0.0
        self._pool = ThreadPoolExecutor(count)
        self._clients: list[Future[None]] = []

    def __enter__(self) -> Clients:
        for number in range(self._count):
            ask = self._stream if number < self._streams else self._predict
            self._clients.append(self._pool.submit(self._client, ask))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def wait_for_more(self, answers: int) -> None:
        """Until so many more were given, of what was asked for after now or before."""
        enough = self.answers.total() + answers
        eventually(lambda: self.answers.total() >= enough or any(c.done() for c in self._clients))

    def _client(self, ask: Callable[[requests.Session, str], str | int]) -> None:
        with requests.Session() as session:
            while not self._stop.is_set():
                with self._turn:
                    name = model(self._asked[self._next % len(self._asked)])
                    self._next += 1
                started = time.monotonic()
                try:
                    said = ask(session, name)
                except requests.RequestException:
                    said = "lost"
                with self._turn:
                    self.answers[said] += 1
                    self.longest_s = max(self.longest_s, time.monotonic() - started)

    def _predict(self, session: requests.Session, name: str) -> str | int:
        url = self._proxy.url(f"/predictions/{name}")
        answer = session.post(url, json=SHORT, timeout=90)
        with self._turn:
            self.served[name, answer.headers.get(SERVED_BY, "")] += 1
        if answer.status_code != 200:
            return answer.status_code
        return 200 if answer.json()["generated_text"] == self._expected[name] else "wrong"

    def _stream(self, session: requests.Session, name: str) -> str | int:
        url = self._proxy.url(f"/predictions/{name}")
        body = {**SHORT, "stream": True}
        with session.post(url, json=body, timeout=90, stream=True) as answer:
            if answer.status_code != 200:
                return answer.status_code
            try:
                text = answer.content.decode()
            except requests.exceptions.ChunkedEncodingError:
                self.begun["cut off"] += 1
                return 200
        if '"error"' in text:
            self.begun["typed error"] += 1
            return 200
        return 200 if self._expected[name] in text else "wrong"


@contextlib.contextmanager
def stopping(*servers: Server) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.stop()
