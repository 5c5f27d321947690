"""Errors that clients see, with their HTTP statuses: the base class and the engine's errors."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

MAX_MESSAGE = 2000
SHORT = Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100


def cut(text: str, most: int = MAX_MESSAGE) -> str:
    """Shorten a text to `most` characters by removing its middle.

    A message may quote a megabyte of an artifact before it explains the error.
    """
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def quoted(value: Any, most: int = 100) -> str:
    """Return a short `repr` of a value from outside; plain `repr` fails for deep nesting."""
    return cut(SHORT.repr(value), most)


class ServiceError(Exception):
    """Base of all errors whose message is for users.

    `status` is the HTTP status, `type` the name that clients know. The message can always be sent:
    it is short, and has no half surrogate pairs, which UTF-8 cannot encode.
    """

    status = 500
    type = "InternalServerException"
    retry_after_s: float | None = None  # when a retry may succeed; None: not known

    def __init_subclass__(cls, status: int | None = None, type: str | None = None) -> None:
        cls.status, cls.type = status or cls.status, type or cls.type

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.message = cut(message.encode("utf-8", "backslashreplace").decode())
        super().__init__(self.message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def to_body(self) -> dict[str, object]:
        """Return the error in Multi Model Server's form: `{"code", "type", "message"}`."""
        return {"code": self.status, "type": self.type, "message": self.message}


class SettingError(ServiceError):
    """An option or environment variable has an invalid value."""


class EngineError(ServiceError):
    """Base of the errors of the engine and of workers; each has its class name as `type`."""

    type = "EngineError"

    def __init_subclass__(cls, status: int | None = None) -> None:
        super().__init_subclass__(status, cls.__name__)


def named(kind: object, message: str, retry_after_s: float | None = None) -> EngineError | None:
    """Create the error whose class has the name `kind`; None if there is no such class."""
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

    Of `needed_bytes`, `missing_bytes` are not available; both are 0 if that is not known.
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
