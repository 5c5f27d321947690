"""SageMaker's time limits for a container, and its errors."""

from __future__ import annotations

PING_S = 2.0
CONNECT_S = 0.25
ANSWER_S = 60.0
COLD_START_S = 60.0  # until ModelNotReadyException; the load continues
LOAD_S = UNLOAD_S = 360.0


class PlatformError(Exception):
    """An error as the sagemaker-runtime API sends it: `status`, `kind` and JSON `fields`."""

    def __init__(self, status: int, kind: str, message: str, **fields: object) -> None:
        super().__init__(f"{kind}: {message}")
        self.status, self.kind = status, kind
        self.fields = {"Message": message, **fields}


def validation_error(message: str) -> PlatformError:
    return PlatformError(400, "ValidationError", message)


def model_not_ready(target: str) -> PlatformError:
    return PlatformError(
        429, "ModelNotReadyException", f"Model {target} is still being loaded. Try again."
    )


def unavailable(message: str) -> PlatformError:
    return PlatformError(503, "ServiceUnavailable", message)


def timed_out() -> PlatformError:
    return model_error(
        0, b"Your invocation timed out while waiting for a response from container primary."
    )


def model_error(status: int, body: bytes) -> PlatformError:
    """An error status of a container."""
    text = body.decode("utf-8", "replace")
    side = "client" if 400 <= status < 500 else "server"
    return PlatformError(
        424,
        "ModelError",
        f"Received {side} error ({status}) from primary with message {text!r}.",
        ErrorCode="MODEL_ERROR",
        OriginalMessage=text,
        OriginalStatusCode=status,
        LogStreamArn="",
    )
