"""`grpc.health.v1.Health`: whether the server takes requests, as `/v2/health/ready` does."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import grpc

from serving.api.gateway import Gateway
from serving.api.grpc.calls import Idle, service
from serving.api.grpc.inference import SERVICE
from serving.api.grpc.messages import message
from serving.errors import RequestTimeout, ServingError

HEALTH = "grpc.health.v1.Health"
POLL_S = 1.0
WRITE_S = 5.0  # for a message; longer: a client that reads nothing keeps its Watch for longer
MAX_WATCHES = 256  # more than any load balancer's; a Watch never ends and needs no token
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

Response = message("grpc.health.v1.HealthCheckResponse")


class Health:
    def __init__(self, gateway: Gateway, idle: Idle) -> None:
        self._gateway, self._idle, self._watches = gateway, idle, Idle(MAX_WATCHES)

    def handlers(self) -> Any:
        return service(HEALTH, {"Check": self._check, "Watch": self._watch}, self._idle)

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE, HEALTH):
            return SERVICE_UNKNOWN
        try:
            self._gateway.check_health()
        except ServingError:
            return NOT_SERVING
        return SERVING

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {request.service:.100}")
        return Response(status=status)

    async def _watch(self, request: Any, context: Any) -> None:
        """Send the status, and each change of it, until the client ends the call."""

        async def watch() -> None:
            sent = None
            while True:
                status = self._status(request.service)
                if status != sent:
                    # gRPC cannot send the status of a call whose first message is cut off.
                    with anyio.move_on_after(WRITE_S, shield=True) as writing:
                        await context.write(Response(status=status))
                    if writing.cancelled_caught:
                        raise RequestTimeout(f"the client read nothing for {WRITE_S:g} s")
                    sent = status
                await asyncio.sleep(POLL_S)

        await self._watches.run(watch())
