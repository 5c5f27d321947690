"""Errors of calls to a server or an endpoint."""

from __future__ import annotations

from command.errors import Failed

UNREACHABLE = "no answer"  # kind of an error without a connection or an answer


class CallFailed(Failed):
    """A call got an error or no answer. `status` is the HTTP status, 0 without an answer."""

    def __init__(self, message: str, status: int = 0, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind or (str(status) if status else UNREACHABLE)


class NotReady(CallFailed):
    """The platform is still loading the model: worth another try."""
