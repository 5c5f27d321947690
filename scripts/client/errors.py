"""What can go wrong with a call."""

from __future__ import annotations

from command.errors import Failed


class CallFailed(Failed):
    """A call got an error or no answer. `status` is the server's, 0 where none came."""

    def __init__(self, message: str, status: int = 0, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind or (str(status) if status else "no answer")


class NotReady(CallFailed):
    """The platform is still loading the model: worth another try."""
