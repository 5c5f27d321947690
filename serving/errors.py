"""Errors that end the server or a request, with the status they become."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import ServiceError


class ServingError(ServiceError):
    """Base of the serving package's errors; `type` is what clients of Multi Model Server know one
    by, where they know one."""


class StartError(ServingError):
    """The server cannot start here: a taken port, no Java, a second server in the same folder."""


class ArchiveError(ServingError, status=400, type="ArtifactError"):
    """An archive is damaged, too large, or would write outside its folder. Its type is the engine's
    for a folder that is no model."""


# Requests


class BadRequest(ServingError, status=400, type="BadRequestException"):
    """A parameter is missing, of the wrong type, out of range, or unknown."""


class NotOfTheEngine(BadRequest):
    """The model is no text model of the engine's, which alone can be asked so."""


class Unauthorized(ServingError, status=401, type="UnauthorizedException"): ...


class Forbidden(ServingError, status=403, type="ForbiddenException"): ...


class ModelNotFound(ServingError, status=404, type="ModelNotFoundException"): ...


class ResourceNotFound(ServingError, status=404, type="ResourceNotFoundException"):
    """No such route."""


class MethodNotAllowed(ServingError, status=405, type="MethodNotAllowedException"):
    """`allowed` are the methods that the path knows."""

    def __init__(self, message: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.allowed = sorted(allowed)


class RequestTimeout(ServingError, status=408, type="RequestTimeoutException"):
    """The request itself did not arrive in time."""


class Conflict(ServingError, status=409, type="ConflictStatusException"):
    """The name is taken: by a model that is loaded, loading or being unloaded."""


class LoadCancelled(Conflict):
    """The model was unloaded while it was being loaded."""


class BodyTooLarge(ServingError, status=413, type="RequestTooLargeException"): ...


class UnsupportedMediaType(ServingError, status=415, type="UnsupportedMediaTypeException"): ...


class UnsupportedEncoding(UnsupportedMediaType):
    """The body is compressed in a way that is not known here."""


class TooManyRequests(ServingError, status=429, type="TooManyRequestsException"):
    """As many requests to the model are waiting, or as many sessions are open, as may."""


class HeadersTooLarge(ServingError, status=431, type="RequestHeaderFieldsTooLargeException"): ...


class WorkerFailed(ServingError, status=500, type="WorkerFailedException"):
    """The model's worker died, or answered what cannot be understood."""


class WorkerLost(WorkerFailed):
    """Its process ended before it did anything; another one may do better."""


class Unavailable(ServingError, status=503, type="ServiceUnavailableException"):
    """Starting, draining or broken: worth another try later."""

    retry_after_s = 1.0


class MMSEnded(Unavailable):
    """Multi Model Server ended while it had the request."""


class StillLoading(Unavailable, type="ModelsLoadingException"):
    """The server itself has started; the models that are to be there first have not all loaded."""


class Timeout(ServingError, status=504, type="TimeoutException"): ...


class NoRoom(ServingError, status=507, type="InsufficientStorageException"):
    """No memory or disk for the model: unload another one. `missing_bytes` is 0 if unknown."""

    def __init__(self, message: str, *, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


# The artifact store


class UrlNotAllowed(BadRequest):
    """A model's url or name is outside what may be loaded; the message says what may."""


class ModelNotInStore(ModelNotFound):
    """The store has no such model, or the url leads to nothing."""


class NotAModel(ServingError, status=400, type="ArtifactError"):
    """Something has that name in the store, and is none of what is served."""


class StoreAccessDenied(ServingError, status=403, type="AccessDeniedException"):
    """The store refuses us: missing or wrong credentials, or a missing permission."""


class StoreUnavailable(Unavailable):
    """The store does not answer, or breaks off."""

    retry_after_s = 5.0  # it was asked more than once


class ArtifactChanged(Unavailable):
    """The artifact was replaced while it was fetched; the next try gets the new one."""


class DiskFull(NoRoom):
    """The cache has no room: what is in it is in use."""


class ModelTooLarge(ServingError, status=507, type="InsufficientStorageException"):
    """The model is larger than the whole cache: no unloading helps."""
