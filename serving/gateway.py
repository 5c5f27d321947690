"""The gateway process: the public ports and contracts, in front of Multi Model Server.

The entrypoint opens the ports and starts `python -m serving.gateway [FILE...]` with the file
descriptors of their sockets. The sockets outlive this process, so clients that connect while it is
restarted wait for it. The port for requests serves all contracts; the management port loads, lists
and unloads models and reports health.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import uvicorn
import uvloop
from starlette.types import ASGIApp

from common.errors import ServiceError
from common.logs import log_as_json
from common.oom import SERVER, expendable
from common.open_files import raise_open_files_limit
from common.parent_death import end_with_server
from common.settings import comma_separated
from engine.http.async_client import AsyncEngineClient
from serving.aliases import FILE as ALIASES_FILE
from serving.aliases import Aliases
from serving.api.app import App
from serving.api.gateway import Gateway
from serving.api.http_protocol import HTTPProtocol
from serving.api.metrics import Metrics
from serving.console.journal import Journal
from serving.errors import StartError
from serving.mms import launcher
from serving.mms.client import MMSClient
from serving.mms.workers import Workers
from serving.models.bases import Bases
from serving.models.evictor import Evictor
from serving.models.model import Model
from serving.models.on_demand import OnDemand
from serving.models.recovery import Recovery
from serving.models.registry import Registry
from serving.models.snapshot import Snapshot
from serving.models.startup import start, watch_health
from serving.process.isolation import close_to_others
from serving.process.ports import listen
from serving.settings import Settings
from serving.store import Cache, Lookups, RootFiles, Sources, open_store
from serving.tokens import Tokens

logger = logging.getLogger(__name__)

GIVES_UP = 2  # exit status: it cannot start, and the log has the reason
GRACEFUL_S = 1  # for connections to close after the drain


class _Server(uvicorn.Server):
    """A uvicorn server that drains before it stops.

    While requests in flight are finished, for at most DRAIN_S, `/ping` returns 503.
    """

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self._gateway.draining:
            self._gateway.draining = True
            self._gateway.drain_end = time.monotonic() + self._gateway.settings.drain_s
            self._gateway.started_or_stopping.set()
            self._gateway.stopping.set()
            self._gateway.tasks.add(asyncio.get_running_loop().create_task(self._drain()))

    async def _drain(self) -> None:
        while self._gateway.requests and time.monotonic() < self._gateway.drain_end:
            await asyncio.sleep(0.02)
        self.should_exit = True


def _sources(settings: Settings) -> Sources:
    base = Path(settings.base_dir)
    roots, root_files = (base / "model", base / "models"), None
    if file := os.environ.get("ROOT_FILES"):
        requests = socket.socket(fileno=int(file))
        requests.set_inheritable(False)
        root_files = RootFiles(requests, roots)
    hosts = tuple(comma_separated(settings.https_hosts))
    return Sources(open_store(settings.model_store), roots, hosts, root_files)


@contextlib.asynccontextmanager
async def _gateway(settings: Settings, run_dir: Path, secret: str) -> AsyncIterator[Gateway]:
    sources = await asyncio.to_thread(_sources, settings)
    lookups = Lookups(sources)
    cache_dir = Path(settings.model_cache or run_dir / "models").absolute()
    limits = (settings.cache_max_mib << 20, settings.model_max_mib << 20)
    cache = Cache(sources, cache_dir, *limits)
    metrics, journal = Metrics(run_dir=run_dir), Journal()

    def observe(event: str, model: Model, seconds: float) -> None:
        metrics.observe(event, model, seconds)
        journal.observe(event, model, seconds)

    client = MMSClient(launcher.mms_socket(run_dir), secret)
    engine = AsyncEngineClient(launcher.engine_socket(run_dir))
    workers, snapshot = Workers(settings, run_dir, client, engine), Snapshot(run_dir)
    single = str(Path(settings.base_dir, "model"))
    bases = Bases(lookups, settings, {single: settings.single_model_name})
    # No aliases in a multi-model endpoint: there, SageMaker decides which models are loaded.
    aliases = Aliases(None if settings.sagemaker_multi_model else lookups, run_dir / ALIASES_FILE)
    registry = Registry(
        settings, workers, cache, observe, snapshot.write, journal.changed, bases.find
    )
    gateway = Gateway(
        settings=settings,
        registry=registry,
        on_demand=OnDemand(registry, lookups, Evictor(registry, workers, observe)),
        recovery=Recovery(settings, registry, workers, snapshot),
        mms=client,
        engine=engine,
        lookups=lookups,
        metrics=metrics,
        journal=journal,
        tokens=Tokens(settings.tokens_file),
        aliases=aliases,
        takes_over=snapshot.exists(),
    )
    await gateway.tokens.refresh()
    try:
        yield gateway
    finally:
        for task in gateway.tasks:
            task.cancel()
        lookups.close()
        await asyncio.to_thread(cache.close)  # downloads end; the next server resumes them
        client.close()
        engine.close()


async def serve(settings: Settings, run_dir: Path, secret: str) -> None:
    """Run the gateway until SIGTERM or SIGINT.

    Raises `ServingError` if it cannot start, an `ExceptionGroup` if a background task fails.
    """
    listeners = [socket.socket(fileno=int(file)) for file in sys.argv[1:]]
    listeners = listeners or [listen(settings.host, port) for port in settings.ports]
    for listener in listeners:
        listener.set_inheritable(False)
    # Each port may use an equal share of the open files; one more share is for internal requests.
    shares = len(settings.ports) + bool(settings.grpc_port) + 1
    HTTPProtocol.max_connections = min(settings.max_connections, raise_open_files_limit() // shares)
    async with (
        _gateway(settings, run_dir, secret) as gateway,
        _traced(gateway, App(gateway)) as app,
    ):
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            http=HTTPProtocol,
            ws="none",
            timeout_graceful_shutdown=GRACEFUL_S,
            server_header=False,
        )
        async with _grpc_port(gateway, app), anyio.create_task_group() as background:
            background.start_soon(watch_health, gateway)
            background.start_soon(gateway.recovery.watch)
            background.start_soon(gateway.on_demand.evictor.watch)
            background.start_soon(start, gateway)
            background.start_soon(gateway.tokens.watch)
            background.start_soon(gateway.aliases.watch)
            # Until now a signal ended this process at once. uvicorn handles it, and sends it again
            # after its shutdown: ignored then, to exit with status 0.
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            signal.signal(signal.SIGINT, lambda number, frame: None)
            await _Server(config, gateway).serve(sockets=listeners)
            background.cancel_scope.cancel()


def _grpc_port(gateway: Gateway, app: ASGIApp) -> contextlib.AbstractAsyncContextManager[None]:
    """Open the gRPC port, if GRPC_PORT is set, for as long as the context lasts.

    grpcio is imported only then: it is optional and takes memory. Raises `StartError` without it.
    """
    if not gateway.settings.grpc_port:
        return contextlib.nullcontext()
    try:
        from serving.api.grpc.port import grpc_port
    except ModuleNotFoundError as error:
        raise StartError(
            f"GRPC_PORT needs {error.name}: pip install -r requirements/grpc.txt"
        ) from None
    return grpc_port(gateway, app, GRACEFUL_S)


def _traced(gateway: Gateway, app: ASGIApp) -> contextlib.AbstractAsyncContextManager[ASGIApp]:
    """Wrap the application to send traces, if OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Raises `StartError` if the OpenTelemetry SDK, which is optional, is not installed.
    """
    if not gateway.settings.otlp_endpoint:
        return contextlib.nullcontext(app)
    try:
        from serving.api.tracing import traced
    except ModuleNotFoundError as error:
        raise StartError(
            f"OTEL_EXPORTER_OTLP_ENDPOINT needs {error.name}: pip install -r"
            " requirements/tracing.txt, scripts/build --tracing for an image, or unset it"
        ) from None
    return traced(gateway, app)


async def _run() -> None:
    """Run the gateway, then end the process without waiting for threads that hang in a store."""
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
    end_with_server()
    close_to_others()
    expendable(SERVER)
    log_as_json("gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    uvloop.run(_run())


if __name__ == "__main__":
    main()
