"""Context variables of the request that a worker is answering."""

from __future__ import annotations

from contextvars import ContextVar

# The gateway's id of the request, by which the engine can cancel it.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
# Tokens of the prompt, and generated tokens.
token_counts: ContextVar[tuple[int, int] | None] = ContextVar("token_counts", default=None)
