"""Errors that end the server or a request, with the status they become."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import ServiceError


class ServingError(ServiceError):
    """Base of the serving package's errors; `type` is Multi Model Server's where it has one."""


def explained(error: Exception) -> str:
    """Return the message of a `ServiceError`; for other errors, a reference to the log."""
    if isinstance(error, ServiceError):
        return error.message
    return "an error inside the server; the log has it"


class StartError(ServingError):
    """The server cannot start: a port is taken, Java is missing, RUN_DIR is in use, or the like."""


class ArchiveError(ServingError, status=400, type="ArtifactError"):
    """An archive is damaged, too large, or would write outside its folder.

    It has the type of the engine's error for a folder that is no model.
    """


# Requests


class BadRequest(ServingError, status=400, type="BadRequestException"):
    """A parameter is missing, of the wrong type, out of range, or unknown."""


class NotOfTheEngine(BadRequest):
    """The route works for text models of the engine only, and the model is of another kind."""


class Unauthorized(ServingError, status=401, type="UnauthorizedException"): ...


class Forbidden(ServingError, status=403, type="ForbiddenException"): ...


class ModelNotFound(ServingError, status=404, type="ModelNotFoundException"): ...


class ResourceNotFound(ServingError, status=404, type="ResourceNotFoundException"):
    """The server has no route with this path."""


class MethodNotAllowed(ServingError, status=405, type="MethodNotAllowedException"):
    """The path does not support the request's method; `allowed` are the methods it supports."""

    def __init__(self, message: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.allowed = sorted(allowed)


class RequestTimeout(ServingError, status=408, type="RequestTimeoutException"):
    """The client did not send its whole request in time."""


class Conflict(ServingError, status=409, type="ConflictStatusException"):
    """The name is taken: by a model that is loaded, loading or being unloaded."""


class LoadCancelled(Conflict):
    """The model was unloaded while it was being loaded."""


class BodyTooLarge(ServingError, status=413, type="RequestTooLargeException"): ...


class UnsupportedMediaType(ServingError, status=415, type="UnsupportedMediaTypeException"): ...


class TooManyRequests(ServingError, status=429, type="TooManyRequestsException"):
    """The queue of the model is full."""


class HeadersTooLarge(ServingError, status=431, type="RequestHeaderFieldsTooLargeException"): ...


class WorkerFailed(ServingError, status=500, type="WorkerFailedException"):
    """The model's worker died, or its answer cannot be parsed."""


class WorkerLost(WorkerFailed):
    """The worker's process ended before it answered; a retry may succeed."""


class Unavailable(ServingError, status=503, type="ServiceUnavailableException"):
    """A part of the server is starting, draining or broken; a later retry may succeed."""

    retry_after_s = 1.0


class MMSEnded(Unavailable):
    """Multi Model Server ended while it was processing the request."""


class StillLoading(Unavailable, type="ModelsLoadingException"):
    """The server has started, and its preloaded models have not all loaded yet."""


class Timeout(ServingError, status=504, type="TimeoutException"): ...


def no_answer(limit_s: float) -> Timeout:
    """Return the error of a request that has no answer `limit_s` after its head."""
    settings = "REQUEST_TIMEOUT_S, the model's timeout_s, or the request's own timeout"
    return Timeout(f"no answer within {limit_s:g} s ({settings})")


class InsufficientStorage(ServingError, status=507, type="InsufficientStorageException"):
    """There is too little memory or disk for the model until another model is unloaded.

    `missing_bytes` is 0 if unknown.
    """

    def __init__(self, message: str, *, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


# The artifact store


class UrlNotAllowed(BadRequest):
    """A model's url or name is invalid or not allowed; the message has the allowed ones."""


class ModelNotInStore(ModelNotFound):
    """The store has no such model, or the url leads to nothing."""


class NotAModel(ServingError, status=400, type="ArtifactError"):
    """A folder or file in the store has the requested name but is no model."""


class StoreAccessDenied(ServingError, status=403, type="AccessDeniedException"):
    """The store refuses access: missing or wrong credentials, or a missing permission."""


class StoreUnavailable(Unavailable):
    """The store does not answer, or ends an answer too early."""

    retry_after_s = 5.0  # longer than others: the store client has retried already


class ArtifactChanged(Unavailable):
    """The artifact was replaced while it was fetched; the next try gets the new one."""


class DiskFull(InsufficientStorage):
    """The cache is full of models that are in use."""


class ModelTooLarge(ServingError, status=507, type="InsufficientStorageException"):
    """The model is larger than the whole cache, so evicting others cannot help."""
