"""The console's routes, on the port for requests.

GET /                  the page, if `Accept` contains text/html; otherwise 405
GET /console/{file}    its scripts, style and icon
GET /console/events    the data of the page, as server-sent events (`serving.console.feed`)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response, StreamingResponse

from common.media_types import ranges
from handlers.payload import to_json
from serving.api.access import Right
from serving.api.gateway import Gateway
from serving.api.naming import may_call
from serving.api.request import Request
from serving.api.routing import EVENTS, Kind, Route
from serving.console.feed import Feed
from serving.errors import MethodNotAllowed, ResourceNotFound

PAGE = Path(__file__).with_name("page")
PAGE_METHODS = ("GET", "HEAD", "OPTIONS")
INDEX = "index.html"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Scripts and styles are from this origin only, and text cannot become markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> _File:
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        return cls(content, TYPES[path.suffix], tag)


class Console:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._feed = Feed(gateway)
        paths = (path for path in PAGE.iterdir() if path.suffix in TYPES)
        self._files = {path.name: _File.read(path) for path in paths}

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/", self.page),
            Route("GET", "/console/events", self.events, Kind("", Right.LIST)),
            Route("GET", "/console/{file}", self.file),
        ]

    async def page(self, _: Gateway, request: Request) -> Response:
        if "text/html" not in ranges(request.headers.get("accept")):
            raise MethodNotAllowed("/ takes OPTIONS, and GET with Accept: text/html", PAGE_METHODS)
        return self._send(request, self._files[INDEX])

    async def file(self, _: Gateway, request: Request) -> Response:
        file = self._files.get(request.path_params["file"])
        if file is None:
            raise ResourceNotFound("Requested resource is not found.")
        return self._send(request, file)

    def _send(self, request: Request, file: _File) -> Response:
        headers = {**HEADERS, "etag": file.tag}
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.kind)

    async def events(self, _: Gateway, request: Request) -> Response:
        """Open an event stream. With tokens set, one for requests or management is needed."""
        self._feed.check_watchers()
        return StreamingResponse(
            self._encoded(request), media_type=EVENTS, headers={"cache-control": "no-store"}
        )

    async def _encoded(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the feed as server-sent events about the models that the token may call.

        With a token of TOKENS_FILE the stream ends when the file changes: the page connects again.
        """
        tokens, may_see = self._gateway.tokens, functools.partial(may_call, self._gateway, request)
        version = tokens.version
        async with aclosing(self._feed.watch(may_see)) as messages:
            async for message in messages:
                if request.state.token is not None and tokens.version != version:
                    return
                yield b"data: " + to_json(message) + b"\n\n"
