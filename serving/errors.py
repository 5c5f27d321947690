"""Errors that end the server or a request, with the status they become."""

from __future__ import annotations

from common.errors import ServiceError


class ServingError(ServiceError):
    """Base of the serving package's errors; `type` is what clients of Multi Model Server know one
    by, where they know one."""


class StartError(ServingError):
    """The server cannot start here: a taken port, no Java, a second server in the same folder."""


class ArchiveError(ServingError):
    """An archive is damaged, too large, or would write outside its folder."""

    status = 400
    type = "ArtifactError"  # as the engine calls a folder that is no model


# Requests


class BadRequest(ServingError):
    """A parameter is missing, of the wrong type, out of range, or unknown."""

    status = 400
    type = "BadRequestException"


class NotOfTheEngine(BadRequest):
    """The model is no text model of the engine's, which alone can be asked so."""


class Unauthorized(ServingError):
    status = 401
    type = "UnauthorizedException"


class Forbidden(ServingError):
    status = 403
    type = "ForbiddenException"


class ModelNotFound(ServingError):
    status = 404
    type = "ModelNotFoundException"


class ResourceNotFound(ServingError):
    """No such route."""

    status = 404
    type = "ResourceNotFoundException"


class MethodNotAllowed(ServingError):
    status = 405
    type = "MethodNotAllowedException"


class RequestTimeout(ServingError):
    """The request itself did not arrive in time."""

    status = 408
    type = "RequestTimeoutException"


class Conflict(ServingError):
    """The name is taken: by a model that is loaded, loading or being unloaded."""

    status = 409
    type = "ConflictStatusException"


class LoadCancelled(Conflict):
    """The model was unloaded while it was being loaded."""


class BodyTooLarge(ServingError):
    status = 413
    type = "RequestTooLargeException"


class UnsupportedMediaType(ServingError):
    status = 415
    type = "UnsupportedMediaTypeException"


class UnsupportedEncoding(UnsupportedMediaType):
    """The body is compressed in a way that is not known here."""


class TooManyRequests(ServingError):
    """As many requests to the model are waiting as may."""

    status = 429
    type = "TooManyRequestsException"


class HeadersTooLarge(ServingError):
    status = 431
    type = "RequestHeaderFieldsTooLargeException"


class WorkerFailed(ServingError):
    """The model's worker died, or answered what cannot be understood."""

    status = 500
    type = "WorkerFailedException"


class WorkerLost(WorkerFailed):
    """Its process ended before it did anything; another one may do better."""


class Unavailable(ServingError):
    """Starting, draining or broken: worth another try later."""

    status = 503
    type = "ServiceUnavailableException"


class StillLoading(Unavailable):
    """The server itself has started; the models that are to be there first have not all loaded."""

    type = "ModelsLoadingException"


class Timeout(ServingError):
    status = 504
    type = "TimeoutException"


class NoRoom(ServingError):
    """No memory or disk for the model: unload another one. `missing_bytes` is 0 if unknown."""

    status = 507
    type = "InsufficientStorageException"

    def __init__(self, message: str, *, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


# The artifact store


class UrlNotAllowed(BadRequest):
    """A model's url or name is outside what may be loaded; the message says what may."""


class ModelNotInStore(ModelNotFound):
    """The store has no such model, or the url leads to nothing."""


class StoreAccessDenied(ServingError):
    """The store refuses us: missing or wrong credentials, or a missing permission."""

    status = 403
    type = "AccessDeniedException"


class StoreUnavailable(Unavailable):
    """The store does not answer, or breaks off."""


class ArtifactChanged(Unavailable):
    """The artifact was replaced while it was fetched; the next try gets the new one."""


class DiskFull(NoRoom):
    """The cache has no room: what is in it is in use."""


class ModelTooLarge(ServingError):
    """The model is larger than the whole cache: no unloading helps."""

    status = 507
    type = "InsufficientStorageException"
