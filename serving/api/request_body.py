"""Reads the bodies of requests, within their limits, and names in headers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import CancelScope

from common.errors import InvalidRequest
from common.json_body import MAX_VALUES, read_json
from common.media_types import JSON
from serving.api.gateway import Gateway
from serving.api.request import Request
from serving.errors import (
    BadRequest,
    BodyTooLarge,
    RequestTimeout,
    Unavailable,
    UnsupportedMediaType,
)

LARGEST_BODIES = 32  # all bodies together may take as much memory as so many of the largest size
LARGE_BYTES = 64 << 10  # parsing so many takes a millisecond; more is parsed on a thread
T = TypeVar("T")


async def read_body(gateway: Gateway, request: Request) -> bytes:
    """Return a request's body.

    Raises `BodyTooLarge` as soon as the limit is exceeded, `RequestTimeout` if it arrives too late,
    `Unavailable` if too many bodies are in memory, `UnsupportedMediaType` for a compressed one.
    """
    settings = gateway.settings
    limit = settings.max_request_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {announced} bytes, at most {limit} are taken")
    check_encoding(request)
    body = bytearray()
    with CancelScope(deadline=request.state.started + settings.request_timeout_s) as scope:
        async for chunk in request.stream():
            body += chunk
            gateway.body_bytes += len(chunk)
            request.state.body_bytes += len(chunk)
            if len(body) > limit:
                raise BodyTooLarge(f"the body has more than {limit} bytes")
            if gateway.body_bytes > LARGEST_BODIES * limit:
                raise Unavailable("too many large bodies are being worked on")
    if scope.cancelled_caught:
        raise RequestTimeout(f"the body has {settings.request_timeout_s} s to arrive")
    return bytes(body)


def check_encoding(request: Request) -> None:
    """Raise `UnsupportedMediaType` for a compressed body."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(
            f"Content-Encoding is {encoding:.100}: send the body without compression"
        )


async def off_loop(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work`, whose input has `size` bytes, on a thread if it may take milliseconds."""
    if size <= LARGE_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


async def read_json_object(
    gateway: Gateway, request: Request, *, of_any_type: bool = False
) -> dict[str, Any]:
    """Return a JSON body, `{}` for an empty one. Raises `BadRequest` and what `read_body` does."""
    body = await read_body(gateway, request)
    if not body.strip():
        return {}
    kind = request.headers.get("content-type", "")
    if not of_any_type and kind.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(
            f"Content-Type is {kind[:100] or 'missing'}, must be {JSON}"
            " (with curl: -H 'Content-Type: application/json')"
        )
    try:
        value = await off_loop(len(body), read_json, body, MAX_VALUES)
    except InvalidRequest as error:
        raise BadRequest(error.message) from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def header_text(value: str) -> str:
    """Return a header that may hold a name, decoded as UTF-8; HTTP itself knows Latin-1 only."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value
