"""Hostile requests to a running server: every route of its OpenAPI document, with bodies made from
the corpora, odd names and headers.

Failures are a 5xx that is no overload, a traceback in an answer or in the log, a changed text of a
model beside them, and those of `tests.fuzz.lasting`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import quote

from onnx import TensorProto

from serving.api import routes
from tests.e2e.server import Server
from tests.e2e.stores import serving, text
from tests.engine.models import make_artifact
from tests.fuzz.cases import ODD, case, seeds
from tests.handlers.tensors.graphs import identity

WIDE_S = 90.0
LARGE_ONE_IN = 1000
KINDS = ("text-json", "json", "openai", "generate", "v2-binary", "npy", "csv", "settings", "grpc")
FITTING = {"/v1/": "openai", "/generate": "generate", "/infer": "v2-binary"}
TYPES = (
    *("application/json", "text/plain", "application/x-npy", "text/csv", "text/html", ""),
    "application/jsonlines",
    *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("application/json; charset=nonsense", "multipart/form-data", "x" * 8000, "\xea\xb0\x80"),
)
NAMES = ("a", "시", unicodedata.normalize("NFD", "시"), "tensors", "texts", "script", "absent", "x")
HEAVY = ("tensors", "texts", "script")  # processes that take seconds to start again
NEIGHBOUR = "곁"
# Loaded before the first request, and named by none.
BESIDE = (NEIGHBOUR, "곁-script", "곁-tensors")
ODD_NAMES = (
    *("..", "%2e%2e%2fa", "a/../b", "%00", "%ff", "a" * 1500, quote("가" * 400), ".", "%2f"),
    "a%0d%0ab",
)
SCRIPT = """
def model_fn(model_dir):
    return model_dir

def transform_fn(model, body, content_type, accept):
    return body, "application/octet-stream"
"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A server with small models of each kind; those beside are loaded."""
    store = folder / "store"
    for seed, name in enumerate(("a", "시", NEIGHBOUR)):
        make_artifact(
            store / name, layers=1, units=32, heads=2, vocab=160, max_length=24, seed=seed
        )
    identity(store / "texts" / "model.onnx", TensorProto.STRING, ["n"])
    for beside in ("", f"{NEIGHBOUR}-"):
        identity(store / f"{beside}tensors" / "model.onnx", TensorProto.FLOAT, ["n", 2])
        (store / f"{beside}script" / "code").mkdir(parents=True)
        (store / f"{beside}script" / "code" / "inference.py").write_text(SCRIPT)
    homes = {name: str(folder / name.lower()) for name in ("HOME", "TMPDIR")}
    for home in homes.values():
        Path(home).mkdir()
    with serving(folder / "server", store, **homes) as server:
        for name in BESIDE:
            assert server.load(name, pinned=True).status_code == 200
        yield server


@cache
def large() -> list[bytes]:
    """Bodies of nearly the largest size that take long to read, and one too large."""
    fields = b",".join(b'"f%d":"a"' % i for i in range(440_000))
    messages = b",".join([b'{"role":"user","content":"a"}'] * 200_000)
    biases = b",".join(b'"%d":1' % i for i in range(500_000))
    return [
        b'{"inputs":"' + "가".encode() * 2_100_000 + b'"}',
        b'{"inputs":{' + fields + b"}}",
        b'{"inputs":"a","parameters":{"logit_bias":{' + biases + b"}}}",
        b'{"model":"a","messages":[' + messages + b"]}",
        b'{"model":"a","prompt":[' + b"1," * 3_000_000 + b"1]}",
        b"[" * 6_600_000,
    ]


class Client:
    """Sends random requests on one connection after the other; counts their statuses."""

    def __init__(self, server: Server, seed: int) -> None:
        self._ports = (server.port, server.management_port)
        self._rng = random.Random(seed)  # noqa: S311
        self._seeds = {kind: seeds(kind) for kind in KINDS}
        self._routes = [
            (method.upper(), path)
            for path, methods in routes.document()["paths"].items()
            for method in methods
        ]
        self._open: dict[int, http.client.HTTPConnection] = {}
        self.statuses: Counter[int] = Counter()

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()

    def ask(self) -> None:
        """Sends one random request and checks its answer."""
        rng = self._rng
        port = self._ports[rng.random() < 0.1]
        method, path = rng.choice(self._routes)
        if rng.random() < 0.03:
            method = rng.choice(("PUT", "PATCH", "HEAD", "DELETE", "OPTIONS", "POST", "GET"))
        kind = next((kind for part, kind in FITTING.items() if part in path), "text-json")
        name = quote(rng.choice(NAMES)) if rng.random() < 0.9 else rng.choice(ODD_NAMES)
        if method in ("DELETE", "PUT") and name in HEAVY and rng.random() < 0.95:
            name = "a"
        for part in ("{name}", "{endpoint}", "{version}"):
            path = path.replace(part, name if part == "{name}" else "1")
        if path == "/models" and method == "POST":
            body: bytes | None = self._load()
        else:
            body = case(rng, self._seeds[kind if rng.random() < 0.7 else rng.choice(KINDS)])
        if method in ("GET", "HEAD", "DELETE", "OPTIONS") and rng.random() < 0.9:
            body = None
        if body is not None and rng.randrange(LARGE_ONE_IN) == 0:
            body = rng.choice(large())
        headers = self._headers(name)
        if rng.random() < 0.1:
            field = quote(str(rng.choice(ODD))[:200], safe="=&", errors="replace")
            path += f"?{field}={quote(name)}"
        self._send(port, method, path, body, headers)

    def _load(self) -> bytes:
        rng = self._rng
        given = {"model_name": "x", "url": rng.choice(NAMES), "synchronous": rng.random() < 0.9}
        body = json.dumps(given).encode()
        return case(rng, [body]) if rng.random() < 0.7 else body

    def _headers(self, name: str) -> dict[str, str]:
        rng = self._rng
        found = {"Content-Type": "application/json"}
        if rng.random() < 0.3:
            found["Content-Type"] = rng.choice(TYPES)
        if rng.random() < 0.5:
            found["X-Amzn-SageMaker-Target-Model"] = name
        for header, values in (
            ("Accept", ("*/*", "text/event-stream", "application/x-ndjson", "text/csv", "a;q=nan")),
            ("Accept", ("a/b;q=\t1", "x" * 5000, "\xea\xb0\x80", "\xff\xfe")),
            ("X-Amzn-SageMaker-Custom-Attributes", ("a%0d%0ab: c", "x" * 50_000, "\xff")),
            ("X-Amzn-SageMaker-Target-Model", ("../../etc/passwd", "x" * 9000, "\xff")),
            ("X-KoGPT2-Probe", ("guess",)),
            ("X-KoGPT2-Timeout", ("nonsense",)),
            ("Connection", ("upgrade",)),
            ("Content-Encoding", ("gzip", "identity")),
            ("Inference-Header-Content-Length", ("4", "0", "99999999", "-1", "9" * 30)),
            ("X-Amzn-SageMaker-Session-Id", ("NEW_SESSION", "../lock", "0" * 8000)),
            ("Authorization", ("Bearer x", "Basic eA==", "Bearer")),
            ("X-Request-Id", ("${jndi:ldap://127.0.0.1:1/a}", "a" * 129, "r 1")),
            ("Expect", ("100-continue",)),
            ("Origin", ("http://a", "null", "http://[")),
        ):
            if rng.random() < 0.08:
                found[header] = rng.choice(values)
        return found

    def _send(
        self, port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> None:
        shown = f"{method} {path} {headers} {body!r:.2000}"
        connection = self._open.setdefault(
            port, http.client.HTTPConnection("127.0.0.1", port, timeout=WIDE_S)
        )
        is_new = connection.sock is None
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (http.client.RemoteDisconnected, ConnectionError):
            connection.close()
            assert not is_new, f"{shown}: no answer on a new connection"
            self._send(port, method, path, body, headers)  # it was idle for too long
            return
        self.statuses[answer.status] += 1
        shown += f": {answer.status} {content!r:.500}"
        assert b"Traceback" not in content, shown
        assert answer.headers["x-request-id"], shown
        if answer.status == 424:
            assert json.loads(content)["OriginalStatusCode"] < 500, shown
        elif answer.status >= 500:
            later = answer.headers["Retry-After"] or path.partition("?")[0].endswith("/ready")
            assert (answer.status == 503 and later) or answer.status == 507, shown


def neighbour(server: Server, ended: threading.Event) -> int:
    """Calls a model that no hostile request names, until `ended`; its text stays the same. Returns
    the number of answers."""
    count, first = 0, ""
    while not ended.wait(0.02):
        body = {"inputs": "나", "parameters": {"do_sample": False}}
        answer = text(server.predict(NEIGHBOUR, body))
        count, first = count + 1, first or answer
        assert answer == first
    return count
