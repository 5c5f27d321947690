"""The engine's socket, and the server on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.one_write import join
from engine import sandbox
from engine.engine import Engine
from engine.http.server import EngineApp
from engine.settings import Settings

logger = logging.getLogger(__name__)


def listen(path: str) -> socket.socket:
    """Bind a unix socket that only this user can reach, in place of a stale one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(512)
    return listener


class _Protocol(HttpToolsProtocol):
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            async def send_on(message: Any) -> None:
                join(cycle, message)
                await send(message)

            await app(scope, receive, send_on)

        super()._start_asgi_task(cycle, answer)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: EngineApp) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._app.stopping.set()
        self.should_exit = True  # uvicorn's handler would end the process before engine.close


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight have 25 s to finish."""
    sandbox.prepare(*(["engine.native.prepared"] if settings.device == "cpu" else []))
    engine = Engine(settings)

    async def main() -> None:
        app = EngineApp(engine)
        config = uvicorn.Config(
            app.asgi,
            http=_Protocol,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=25,
        )
        await _Server(config, app).serve(sockets=[listener])
        await asyncio.to_thread(engine.close)  # the loop must run until the engine's threads end

    listener = listen(settings.socket)
    logger.info("the engine listens on %s (%s)", settings.socket, settings.backend)
    uvloop.run(main())
