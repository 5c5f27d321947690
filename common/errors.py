"""All errors with their HTTP statuses: the base class, and those of the engine."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

MAX_MESSAGE = 2000
SHORT = Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100


def cut(text: str, most: int = MAX_MESSAGE) -> str:
    """Shorten a text to `most` characters, both ends kept.

    A message may quote a megabyte of an artifact, with the explanation behind it.
    """
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def quoted(value: Any, most: int = 100) -> str:
    """A foreign value as Python writes it, shortened; `repr` itself fails for deep nesting."""
    return cut(SHORT.repr(value), most)


class ServiceError(Exception):
    """Base of all errors with messages for people.

    `status` is the HTTP status, `type` the name that clients know. The message is safe to send,
    whatever it quotes: it is short and has no half surrogate pairs.
    """

    status = 500
    type = "InternalServerException"
    retry_after_s: float | None = None  # when it is worth another try, where it is

    def __init_subclass__(cls, status: int | None = None, type: str | None = None) -> None:
        cls.status, cls.type = status or cls.status, type or cls.type

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.message = cut(message.encode("utf-8", "backslashreplace").decode())
        super().__init__(self.message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def to_body(self) -> dict[str, object]:
        """The error as MMS writes its own: `{"code", "type", "message"}`."""
        return {"code": self.status, "type": self.type, "message": self.message}


class SettingError(ServiceError):
    """An option or environment variable has an invalid value."""


class EngineError(ServiceError):
    """Base of the errors of the engine and of workers; each has its class name as `type`."""

    type = "EngineError"

    def __init_subclass__(cls, status: int | None = None) -> None:
        super().__init_subclass__(status, cls.__name__)


def named(kind: object, message: str, retry_after_s: float | None = None) -> EngineError | None:
    """The error of this `type`, as another process sent it; None for an unknown type."""
    error = globals().get(str(kind))
    if isinstance(error, type) and issubclass(error, EngineError):
        return error(message, retry_after_s=retry_after_s)
    return None


class InvalidRequest(EngineError, status=400):
    """A `field` of the request is missing, of the wrong type, out of range, or unknown."""

    def __init__(self, message: str, *, field: str = "", **options: float | None) -> None:
        super().__init__(message, **options)
        self.field = field


class ArtifactError(EngineError, status=400):
    """The model's folder does not hold a model that can be served."""


class ModelNotFound(EngineError, status=404): ...


class Cancelled(EngineError, status=499):
    """The client has disconnected; the response is not read."""


class ModelAlreadyLoaded(EngineError, status=409): ...


class NotAcceptable(EngineError, status=406): ...


class PromptTooLong(EngineError, status=413): ...


class UnsupportedMediaType(EngineError, status=415): ...


class Overloaded(EngineError, status=503):
    """The queue is full; a client may retry after `retry_after_s` seconds."""

    retry_after_s = 1.0


class EngineUnavailable(EngineError, status=503):
    """The engine process does not run, or ended during the request."""

    retry_after_s = 1.0


class DeadlineExceeded(EngineError, status=504): ...


class OutOfMemory(EngineError, status=507):
    """The memory budget is exhausted: unload another model or raise the budget.

    `missing_bytes` is what is missing of `needed_bytes`; both are 0 where that is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        missing_bytes: int = 0,
        needed_bytes: int = 0,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.missing_bytes, self.needed_bytes = missing_bytes, needed_bytes


class NeverFits(OutOfMemory):
    """The model needs more than the whole budget; unloading others does not help."""
