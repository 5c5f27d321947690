"""The gateway process: the public ports and contracts, in front of Multi Model Server.

`python -m serving.gateway`, started by the entrypoint. Two ports, one process: the port for
requests answers every contract, the management port loads, lists and unloads, and tells its health.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import EngineError, ServiceError
from common.logs import log_as_json
from common.oom import SERVER, expendable
from common.worker_protocol import REQUEST_ID
from engine.http.async_client import AsyncEngineClient
from serving.api import openapi
from serving.api.http_protocol import MAX_HEADER_BYTES, HTTPProtocol
from serving.api.inference import Inference
from serving.api.management import Management
from serving.api.metrics import CONTENT_TYPE, Metrics
from serving.api.openai.routes import OpenAI
from serving.api.shared import Gateway, error_response
from serving.api.v2.inference import V2
from serving.console.journal import Journal
from serving.console.routes import Console
from serving.errors import (
    HeadersTooLarge,
    MethodNotAllowed,
    ResourceNotFound,
    ServingError,
    StartError,
)
from serving.mms import launcher
from serving.mms.client import MMSClient
from serving.mms.workers import Workers
from serving.models.model import Model
from serving.models.on_demand import OnDemand
from serving.models.recovery import Recovery
from serving.models.registry import Registry
from serving.models.residency import Residency
from serving.models.snapshot import Snapshot
from serving.models.startup import start, watch_health
from serving.process.isolation import close_to_others
from serving.process.ports import listen
from serving.settings import Settings
from serving.store import Cache, Lookups, StoreSettings, open_store

logger = logging.getLogger(__name__)

GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
GIVES_UP = 2  # exit status: it has said why it cannot start
GRACEFUL_S = 1  # for connections, once the requests are answered or DRAIN_S has passed


class App:
    """The two ports' routes over one `Gateway`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        health = [
            Route("/ping", self._ping, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        management = Management(gateway).routes()
        documents = [
            Route("/api-description", self._openapi, methods=["GET"]),
            Route("/openapi.json", self._openapi, methods=["GET"]),
            Route("/docs", self._docs, methods=["GET"]),
            Route("/", self._openapi, methods=["OPTIONS"]),
        ]
        both = [*health, *documents]
        self._inference = self._app(
            [
                *both,
                *Console(gateway).routes(),
                *Inference(gateway).routes(),
                *OpenAI(gateway).routes(),
                *V2(gateway).routes(),
                *management,
            ]
        )
        self._management = self._app([*both, *management])

    @staticmethod
    def _app(routes: Sequence[Route]) -> ASGIApp:
        app = Starlette(
            routes=list(routes),
            exception_handlers={
                ServiceError: error_response,
                HTTPException: _http_error,
                Exception: error_response,
            },
        )
        app.router.redirect_slashes = False
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.monotonic()
        scope["state"] = {
            "request_id": _request_id(scope),
            "model": None,
            "started": started,
            "body_bytes": 0,
        }
        request_id: str = scope["state"]["request_id"]
        status = 0

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (REQUEST_ID.encode(), request_id.encode()),
                ]
            await send(message)

        # Where both are one, that one has all routes.
        on_requests = scope["server"][1] == self._gateway.settings.port
        app = self._inference if on_requests else self._management
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            app = error_response(
                Request(scope), HeadersTooLarge(f"headers have at most {MAX_HEADER_BYTES} bytes")
            )
        try:
            await app(scope, receive, send_with_id)
        except Exception:  # answered already, by the handler for Exception
            if status == 0:
                raise
        finally:
            self._gateway.body_bytes -= scope["state"]["body_bytes"]
            self._log(scope, status, time.monotonic() - started)

    @staticmethod
    def _log(scope: Scope, status: int, seconds: float) -> None:
        if scope["path"] in ("/ping", "/metrics"):
            return
        headers = dict(scope["headers"])
        target = headers.get(b"x-amzn-sagemaker-target-model", b"").decode("utf-8", "replace")
        fields = {
            "request_id": scope["state"]["request_id"],
            "model": target or scope["state"]["model"],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
        }
        logger.info("request", extra={"fields": fields})

    async def _ping(self, request: Request) -> Response:
        self._gateway.check_health()
        return JSONResponse({"status": "Healthy"})

    async def _metrics(self, request: Request) -> Response:
        gateway = self._gateway
        statistics = None
        with contextlib.suppress(EngineError):
            statistics = await gateway.engine.statistics(timeout_s=2)
        names = gateway.registry.engine_names()
        # Of hundreds of models a fifth of a second's work.
        text = await asyncio.to_thread(gateway.metrics.text, statistics, names)
        return Response(text, media_type=CONTENT_TYPE)

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.document())

    async def _docs(self, request: Request) -> Response:
        return HTMLResponse(openapi.page())


def _request_id(scope: Scope) -> str:
    """The client's own, if it can be a header and a log line; otherwise a new one."""
    given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"").decode("latin-1")
    return given if GIVEN_ID.fullmatch(given) else str(uuid.uuid4())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(request, ResourceNotFound("Requested resource is not found."))
    if error.status_code == 405:
        return error_response(
            request,
            MethodNotAllowed("Requested method is not allowed, please refer to API document."),
        )
    return error_response(request, ServingError(str(error.detail)))


class _Server(uvicorn.Server):
    """Drains before it stops: `/ping` says 503 while requests in flight are finished."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self._gateway.draining:
            self._gateway.draining = True
            self._gateway.tasks.add(asyncio.get_running_loop().create_task(self._drain()))

    async def _drain(self) -> None:
        end = time.monotonic() + self._gateway.settings.drain_s
        while self._gateway.requests and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.should_exit = True


def store_settings(settings: Settings, run_dir: Path) -> StoreSettings:
    base, location = Path(settings.base_dir), settings.model_store
    roots = [base / "model", base / "models"]
    if "://" not in location:
        roots.append(Path(location))
    return StoreSettings(
        location=location,
        cache_dir=Path(settings.model_cache or run_dir / "models").absolute(),
        cache_max_bytes=settings.cache_max_mib << 20,
        model_max_bytes=settings.model_max_mib << 20,
        roots=tuple(roots),
        https_hosts=tuple(filter(None, (h.strip() for h in settings.allowed_hosts.split(",")))),
    )


@contextlib.asynccontextmanager
async def _gateway(settings: Settings, run_dir: Path, secret: str) -> AsyncIterator[Gateway]:
    stores = store_settings(settings, run_dir)
    store = await asyncio.to_thread(open_store, settings.model_store)
    metrics, journal = Metrics(), Journal()

    def observe(event: str, model: Model, seconds: float) -> None:
        metrics.observe(event, model, seconds)
        journal.observe(event, model, seconds)

    client = MMSClient(launcher.mms_socket(run_dir), secret)
    async with AsyncEngineClient(launcher.engine_socket(run_dir)) as engine:
        cache, lookups = Cache(stores), Lookups(store, stores)
        workers, snapshot = Workers(settings, run_dir, client, engine), Snapshot(run_dir)
        registry = Registry(settings, workers, cache, observe, snapshot.write, journal.changed)
        gateway = Gateway(
            settings=settings,
            registry=registry,
            on_demand=OnDemand(registry, lookups, Residency(registry, workers, observe)),
            recovery=Recovery(settings, registry, workers, snapshot),
            mms=client,
            engine=engine,
            lookups=lookups,
            metrics=metrics,
            journal=journal,
        )
        try:
            yield gateway
        finally:
            for task in gateway.tasks:
                task.cancel()
            lookups.close()
            await asyncio.to_thread(cache.close)  # downloads end; the next server resumes them
            await client.close()


async def serve(settings: Settings, run_dir: Path, secret: str) -> None:
    """Runs until SIGTERM. Raises `ServingError` if it cannot start; an `ExceptionGroup` when work
    in the background has ended with an error."""
    listeners = [listen(settings.host, port) for port in settings.ports]
    HTTPProtocol.max_connections = min(settings.max_connections, _open_files() // 2)
    async with _gateway(settings, run_dir, secret) as gateway:
        app = App(gateway)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=HTTPProtocol,
            ws="none",
            timeout_graceful_shutdown=GRACEFUL_S,
            server_header=False,
        )
        async with _grpc_port(gateway, app), anyio.create_task_group() as background:
            background.start_soon(watch_health, gateway)
            background.start_soon(gateway.recovery.watch)
            background.start_soon(gateway.on_demand.residency.watch)
            background.start_soon(start, gateway)
            await _Server(config, gateway).serve(sockets=listeners)
            background.cancel_scope.cancel()


def _grpc_port(gateway: Gateway, app: ASGIApp) -> contextlib.AbstractAsyncContextManager[None]:
    """Its library is an extra, and takes memory."""
    if not gateway.settings.grpc_port:
        return contextlib.nullcontext()
    try:
        from serving.api.grpc.port import grpc_port
    except ModuleNotFoundError as error:
        raise StartError(
            f"GRPC_PORT needs {error.name}: pip install -r requirements/grpc.txt"
        ) from None
    return grpc_port(gateway, app, GRACEFUL_S)


def _open_files() -> int:
    """How many files this process may open, now that it may open as many as it is ever allowed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def _run() -> None:
    """Ends the process: threads that hang in a store or in a file hold up nothing."""
    status = 0
    try:
        settings, run_dir = Settings.read(), Path(os.environ["RUN_DIR"])
        await serve(settings, run_dir, os.environ["PROBE_SECRET"])
    except ServiceError as error:
        print(error.message, file=sys.stderr)
        status = GIVES_UP
    except Exception:
        logger.exception("the gateway ends")
        status = 1  # the supervisor starts it again
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    close_to_others()
    expendable(SERVER)
    log_as_json("gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # uvicorn raises the signal again when it is done; the exit status shall be 0.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    uvloop.run(_run())


if __name__ == "__main__":
    main()
