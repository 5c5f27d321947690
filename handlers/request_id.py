"""The request that a worker is answering."""

from __future__ import annotations

from contextvars import ContextVar

# The gateway's own id for it, under which the engine can be told that nobody waits any more.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
