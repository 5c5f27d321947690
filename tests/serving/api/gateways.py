"""The gateway's routes over workers, an engine and a store that a test has in its hand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import common.errors
from common.worker_protocol import TIMEOUT_HEADER, WORKER_HEADER
from serving.api.app import App
from serving.mms.client import Answer
from serving.models.model import Model, State
from serving.store import Lookups, Sources, StoredModel
from serving.tokens import Tokens
from tests.serving.fakes import Parts

SAID = "가실 때에는"
SECRET = "비밀-하나"  # noqa: S105
BEARER = f"Bearer {SECRET}"
TEXT = json.dumps({"generated_text": SAID}, ensure_ascii=False).encode()


def answered(
    status: int = 200, body: bytes = TEXT, *, by_worker: bool = True, **more: str
) -> Answer:
    headers = {"content-type": "application/json", **more}
    if by_worker:
        headers[WORKER_HEADER] = "1"
    return Answer(status, headers, body)


Asked = Callable[[int], Coroutine[Any, Any, Answer]]
Streamed = Callable[..., Iterable[Any]]


def always(answer: Answer, after: asyncio.Event | None = None) -> Asked:
    """Gives this answer to each call, once `after` is set."""

    async def answer_one(number: int) -> Answer:
        if after is not None:
            await after.wait()
        return answer

    return answer_one


@dataclass
class FakeMMS:
    """`answer` is called with the number of the call, from 0."""

    answer: Asked = field(default_factory=lambda: always(answered()))
    told_s: list[float] = field(default_factory=list)  # how long each had, by its header
    headers: list[dict[str, str]] = field(default_factory=list)  # of each
    bodies: list[bytes] = field(default_factory=list)  # of each

    async def invoke(
        self, name: str, body: bytes, headers: Any, timeout_s: float, query: Any = ()
    ) -> Answer:
        self.headers.append(dict(headers))
        self.bodies.append(body)
        self.told_s.append(float(headers[TIMEOUT_HEADER]))
        return await self.answer(len(self.told_s) - 1)

    async def describe(self, name: str) -> dict[str, Any]:
        return {"workers": []}


class FakeEngine:
    """Keeps what each call asks of it; `fails` are raised by the first calls.

    A request that is called off is over: `over` is set.

    streamed: a stream's tokens, and errors in their place, or a function of a call's arguments
    go: without it no whole answer comes, and nothing follows a stream's first token
    """

    def __init__(self, *fails: Exception, streamed: Iterable[Any] | Streamed = ()) -> None:
        self.fails, self.streamed = list(fails), streamed
        self.asked: list[tuple[Any, ...]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.running = self.most = 0
        self.called_off: list[str] = []
        self.over = asyncio.Event()
        self.held: list[str] = []  # names of the models that it has

    async def models(self) -> list[dict[str, Any]]:
        return [{"name": name} for name in self.held]

    async def cancel(self, id: str) -> None:
        self.called_off.append(id)
        self.over.set()

    async def statistics(self, timeout_s: float = 1) -> dict[str, Any]:
        raise common.errors.EngineUnavailable("the engine does not answer")

    async def generate(self, *asked: Any) -> dict[str, Any]:
        with self._call(asked):
            await self.go.wait()
            completion = {"text": SAID, "tokens": len(SAID), "finish_reason": "length"}
            return {"completions": [completion], "prompt_tokens": 3, "cached_tokens": 2}

    async def stream(self, *asked: Any) -> AsyncIterator[dict[str, Any]]:
        with self._call(asked):
            for item in self.streamed(*asked) if callable(self.streamed) else self.streamed:
                if isinstance(item, Exception):
                    raise item
                yield dict(item)
                await self.go.wait()

    @contextlib.contextmanager
    def _call(self, asked: tuple[Any, ...]) -> Iterator[None]:
        self.asked.append(asked)
        if self.fails:
            raise self.fails.pop(0)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield
        finally:
            self.running -= 1


def model(name: str = "봄", limit_s: float = 60.0, capacity: int = 1) -> Model:
    stored = StoredModel(name=name, url=name, version="1", size_bytes=1, kind="folder")
    made = Model(name, name, f"id-{name}", stored, {"response_timeout": limit_s})
    made.state, made.line.capacity = State.READY, capacity
    return made


class World:
    """A gateway that is ready, with one model, which the `engine` holds where there is one."""

    def __init__(self, only: Model | None = None, engine: Any = None, **settings: Any) -> None:
        self.model = only or model()
        self.mms, self.engine = FakeMMS(), engine or FakeEngine()
        parts = Parts(Path("/nowhere"), **settings)
        self.workers, self.registry, self.recovery = parts.workers, parts.registry, parts.recovery
        self.add(self.model, in_engine=engine is not None)
        lookups = Lookups(Sources(cast(Any, None)))
        self.gateway = parts.gateway(
            mms=self.mms,
            engine=self.engine,
            lookups=lookups,
            healthy=True,
            adopted=True,
            started=True,
        )
        self.app = App(self.gateway)

    def add(self, model: Model, *, in_engine: bool) -> Model:
        """Adds a model that is ready."""
        model.in_engine = in_engine
        self.registry._models[model.name] = self.workers.running[model.id] = model
        self.registry._all.append(model)
        return model

    def scope(self, method: str, path: str, **headers: str) -> dict[str, Any]:
        sent = {"content-type": "application/json", **headers}
        plain, _, query = path.partition("?")
        return {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": plain,
            "raw_path": plain.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in sent.items()],
            "server": ("127.0.0.1", self.gateway.settings.port),
            "client": ("127.0.0.1", 1),
        }

    async def call(
        self,
        method: str,
        path: str,
        body: Any = "text",
        *,
        gone: asyncio.Event | None = None,
        more_body: bool = False,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; `body` is sent as JSON, or as the bytes that it
        is. A client that is `gone` reads nothing more; with `more_body` the rest of the body never
        comes."""
        scope = self.scope(method, path, **headers)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        pieces = [{"type": "http.request", "body": content, "more_body": more_body}]
        messages: list[Any] = []

        async def receive() -> Any:
            if pieces:
                return pieces.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        start, *rest = messages
        found = {k.decode(): v.decode() for k, v in start["headers"]}
        return start["status"], found, b"".join(piece.get("body", b"") for piece in rest)


async def with_token(world: World, folder: Path, **fields: Any) -> World:
    """Gives a world a TOKENS_FILE with `SECRET`, the token of 가팀 for the model 봄."""
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    entry = {"name": "가팀", "sha256": digest, "models": ["봄"], **fields}
    path = folder / "tokens.json"
    path.write_text(json.dumps({"tokens": [entry]}), encoding="utf-8")
    world.gateway.tokens = Tokens(str(path))
    await world.gateway.tokens.refresh()
    return world


@contextlib.asynccontextmanager
async def held(
    world: World, count: int = 1, answer: Answer | None = None, body: Any = "text"
) -> AsyncIterator[None]:
    """Keeps `count` calls at the model or in its line to the end of the block; then they get
    their answer."""
    answer, go = answer or answered(), asyncio.Event()
    world.mms.answer = always(answer, after=go)
    calls = [asyncio.create_task(world.call("POST", "/predictions/봄", body)) for _ in range(count)]
    await settle()
    yield
    go.set()
    assert {(await call)[0] for call in calls} == {answer.status}


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
