"""Clients that mean harm: of the others' requests beside them none fails, and they reach nothing
that has advisories of Multi Model Server's jar, whose Netty and Log4j are of 2023.

Each attack goes on, and begins anew where the server ends it, until the others have had their
answers. `-s` prints how long the slowest of those took: under 1 s on a quiet machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
import requests

from tests.e2e.scripts import transform
from tests.e2e.server import Server, eventually, free_port
from tests.e2e.stores import SHORT, serving, small
from tests.engine.models import make_artifact
from tests.serving.api.test_forms import NAMED, PARTS, RIGHT, part

pytestmark = pytest.mark.slow

CONNECTIONS = 256
ROUNDS = 10
MIB = 1 << 20
LIMIT_S = 180  # of a request: the largest answer takes half a minute beside other tests
JSON = {"Content-Type": "application/json"}
HEAD = b"POST /predictions/a HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# What each of its connections sends, which then neither sends nor reads anything.
STALLS = (
    HEAD + b"Content-Length: 1000\r\n\r\n",
    HEAD,
    b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400,
)
# As many as one answer may have: 16 MB of JSON.
SCORES = {"model": "느린", "prompt": ["나"] * 16, "n": 16, "logprobs": 20, "max_tokens": 70}
BODIES: dict[str, tuple[str, str, bytes]] = {  # each is refused
    "values": ("/predictions/a", JSON["Content-Type"], b"[" + b"{}," * 2_140_000 + b"0]"),
    "streamed values": (
        "/predictions/a",
        JSON["Content-Type"],
        b'{"stream": true, "inputs": [' + b"[]," * 2_140_000 + b"0]}",
    ),
    "chat of values": (
        "/v1/chat/completions",
        JSON["Content-Type"],
        b'{"model": "a", "messages": [' + b"{}," * 2_140_000 + b"0]}",
    ),
    "heads of parts": (
        "/predictions/a",
        PARTS,
        part(NAMED, *["X-A: " + "a" * 1000] * 6000) + b"--x--",
    ),
    "parts of parts": ("/predictions/a", PARTS, b"--x\r\n\r\n" * 900_000),
}

# What has advisories in the jar and no bound of ours (docs/develop/dependencies.md):
# Netty's TLS, HTTP/2, compression, other protocols and requests of its own; Java's JNDI,
# Log4j's sockets; Commons IO's reader of XML and its names of files.
OUT_OF_REACH = re.compile(
    r"io\.netty\.handler\.(ssl\.|codec\.(http2|compression|haproxy|redis|mqtt|smtp|dns|stomp|socks))"
    r"|io\.netty\.handler\.codec\.http\.(HttpRequestEncoder|HttpClientCodec)"
    r"|log4j\.core\.net\.(SslSocketManager|TcpSocketManager)|com\.sun\.jndi\."
    r"|commons\.io\.(input\.XmlStreamReader|FilenameUtils)"
)
PRINTS = """
text = body.decode('utf-8', 'replace') if isinstance(body, (bytes, bytearray)) else str(body)
print(text, flush=True)
return text, 'text/plain'
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    small(folder / "store" / "a")
    small(folder / "store" / "봄")
    make_artifact(folder / "store" / "느린", vocab=160, max_length=128)
    settings = {"MAX_CONNECTIONS": str(CONNECTIONS), "GRPC_PORT": str(free_port())}
    settings["REQUEST_TIMEOUT_S"] = str(LIMIT_S)
    transform(folder / "store" / "script", PRINTS)
    options = "-Xmx256m -XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError -XX:TieredStopAtLevel=1"
    options += f" -Xlog:class+load:file={folder / 'classes'}"
    settings["SAGEMAKER_MODEL_SERVER_VMARGS"] = options
    with serving(folder / "run", folder / "store", **settings) as running:
        for name in ("a", "봄", "느린"):
            assert running.load(name).status_code == 200
        yield running


def check(server: Server, beside: str) -> None:
    """Clients that do nothing wrong are all answered, each request on a connection of its own."""
    asks: list[Callable[[], requests.Response]] = [
        lambda: server.get("/ping"),
        lambda: server.get("/v2/health/live"),
        lambda: server.get("/models", management=True),
        lambda: server.predict("봄", SHORT),
    ]
    failed, slowest_s = [], 0.0
    for ask in asks * ROUNDS:
        began = time.monotonic()
        try:
            answer = ask()
            if answer.status_code != 200:
                failed.append(f"{answer.status_code} {answer.text[:200]}")
        except requests.RequestException as error:
            failed.append(repr(error))
        slowest_s = max(slowest_s, time.monotonic() - began)
    print(f"\nbeside {beside}: slowest of {4 * ROUNDS}: {slowest_s:.2f} s", end=" ")
    assert failed == []


@contextlib.contextmanager
def many_files(count: int) -> Iterator[None]:
    """Lets this process open so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 1024, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def attack(*acts: Callable[[], Any]) -> Iterator[threading.Semaphore]:
    """Each client acts over and over; the semaphore counts how often they have."""
    stop, acted = threading.Event(), threading.Semaphore(0)

    def run(act: Callable[[], Any]) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError, requests.RequestException):
                act()
            acted.release()

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    try:
        yield acted
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT_S + 60)
            assert not thread.is_alive()


def test_connections_that_stall_fail_nobody(server: Server) -> None:
    """One kind by itself: serving/api/test_http_protocol.py."""
    address = "127.0.0.1", server.port
    stalls = itertools.cycle(STALLS)
    with many_files(2 * CONNECTIONS), contextlib.ExitStack() as opened:
        held: list[socket.socket] = []

        def hold() -> None:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            client.sendall(next(stalls))
            held.append(opened.enter_context(client))
            while len(held) > 2 * CONNECTIONS:
                held.pop(0).close()

        for _ in range(CONNECTIONS):
            hold()
        with attack(lambda: (hold(), time.sleep(0.01))):
            check(server, "stalls")


def memory(server: Server) -> dict[str, int]:
    """The memory of the processes that read what clients send."""
    found = {}
    for name in ("serving.gateway", "handlers.host"):
        found[name] = server.descendants(name)[0].memory_info().rss
    return found


@pytest.mark.parametrize("scores", [False, True])
def test_large_bodies_and_answers_fail_nobody_and_take_no_memory(
    server: Server, scores: bool
) -> None:
    asked = {"scores": ("/v1/completions", JSON["Content-Type"], json.dumps(SCORES).encode())}
    statuses: set[tuple[str, int]] = set()

    def post(name: str, path: str, kind: str, content: bytes) -> None:
        headers = {"Content-Type": kind}
        answer = server.post(path, data=content, headers=headers, timeout=LIMIT_S + 30)
        statuses.add((name, answer.status_code))

    before, most = memory(server), dict[str, int]()
    watched = threading.Event()

    def watch() -> None:
        while not watched.wait(0.05):
            for name, size in memory(server).items():
                most[name] = max(most.get(name, 0), size - before[name])

    watching = threading.Thread(target=watch)
    watching.start()
    bodies = asked if scores else BODIES
    try:
        with attack(*(partial(post, name, *body) for name, body in bodies.items())) as acted:
            check(server, " and ".join(bodies))
            for _ in bodies:
                assert acted.acquire(timeout=LIMIT_S + 60)
    finally:
        watched.set()
        watching.join()
    print({name: f"{size / MIB:.0f} MiB" for name, size in most.items()}, end=" ")
    assert statuses == {(name, 200 if scores else 400) for name in bodies}
    assert max(most.values()) < 150 * MIB


# In Java


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("form", RIGHT)
def test_netty_takes_what_is_sent_on(server: Server, form: str) -> None:
    kind, body = RIGHT[form]
    answer = server.predict("script", body, **{"Content-Type": kind})
    assert answer.status_code == 200, answer.text


def test_strings_that_log4j_once_looked_up_are_strings(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        hook = f"${{jndi:ldap://127.0.0.1:{port}/a}}"
        hidden = f"${{${{lower:j}}ndi:rmi://127.0.0.1:{port}/가}}"
        names = ("Accept", "X-Amzn-SageMaker-Custom-Attributes", "X-Request-Id", "User-Agent")
        headers = {**dict.fromkeys(names, hook), "X-Amzn-SageMaker-Target-Model": hook}
        for name in ("봄", "script", hook):
            for kind in ("text/plain", hook, FORM, PARTS):
                disposition = f'form-data; name="{hook}"; filename="{hook}"'
                part = f"--x\r\nContent-Disposition: {disposition}\r\n\r\n{hook}\r\n--x--"
                body = (hidden if kind == "text/plain" else part).encode()
                path = f"{quote(name, safe='')}?{hook}={hook}"
                server.predict(path, body, **headers, **{"Content-Type": kind})
        server.load(hook, "봄")
        server.load("봄", hook, handler=hook)
        # The script has printed it, and so Log4j was given it.
        eventually(lambda: "ndi:rmi://127.0.0.1" in server.text())
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_clients_bytes_reach_none_of_what_has_advisories(server: Server) -> None:
    """After the tests above; Netty's form decoder is reached, which is why forms are bounded."""
    server.predict("script", b"a=b", **{"Content-Type": FORM})
    classes = (server.store.parent / "classes").read_text()
    loaded = set(re.findall(r"(?:io|org|com)\.[\w.$]+", classes))
    assert any("HttpPostRequestDecoder" in name for name in loaded)
    assert not {name for name in loaded if OUT_OF_REACH.search(name)}
