"""The gRPC server, in the gateway's own event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
from starlette.types import ASGIApp

from serving.api.gateway import Gateway
from serving.api.grpc.calls import Idle, Routes, Unread
from serving.api.grpc.health import MAX_WATCHES, Health
from serving.api.grpc.inference import handlers
from serving.api.grpc.stream import Streams
from serving.api.http_protocol import HTTPProtocol
from serving.errors import StartError

HEADROOM_BYTES = 64 << 10  # for the parts of a message beside its tensors
IDLE_S = 300.0  # until a connection without calls is closed; clients then open another


@contextlib.asynccontextmanager
async def grpc_port(gateway: Gateway, asgi: ASGIApp, grace_s: float) -> AsyncIterator[None]:
    """Open the gRPC port for as long as the context lasts. Raises `StartError` if it is taken.

    On exit, calls in flight have `grace_s` seconds to end.
    """
    settings = gateway.settings
    calls = HTTPProtocol.max_connections
    idle, unread = Idle(calls), Unread(HTTPProtocol.max_unread_bytes)
    server = grpc.aio.server(
        # Calls that wait for their clients, limited by `idle`, do not block those in progress.
        maximum_concurrent_rpcs=2 * calls + MAX_WATCHES,
        options=[
            ("grpc.max_receive_message_length", settings.max_request_bytes + HEADROOM_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", calls),
            ("grpc.server_handshake_timeout_ms", round(1000 * HTTPProtocol.head_s)),
            ("grpc.max_connection_idle_ms", round(1000 * IDLE_S)),
        ],
    )
    routes = Routes(asgi, settings.port)
    streams = Streams(gateway, routes, idle, unread)
    services = (handlers(routes, streams.answer, idle, unread), Health(gateway, idle).handlers())
    server.add_generic_rpc_handlers(services)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        server.add_insecure_port(f"{host}:{settings.grpc_port}")
    except RuntimeError as error:
        raise StartError(
            f"cannot listen on {host} port {settings.grpc_port} (GRPC_PORT): {error}"
        ) from None
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace_s)
