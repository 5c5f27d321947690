"""The request that a worker is answering, and what its answer took."""

from __future__ import annotations

from contextvars import ContextVar

# The gateway's own id for it, under which the engine can be told that nobody waits any more.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
# The engine's tokens, of the prompt and made.
token_counts: ContextVar[tuple[int, int] | None] = ContextVar("token_counts", default=None)
