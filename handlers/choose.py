"""Which handler serves a model: by what its folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from engine.errors import ArtifactError

USER_SCRIPTS = ("code/inference.py", "inference.py")


class Handler(Protocol):
    """A module (or object) that loads one kind of artifact and answers for it."""

    # Whether the engine process holds the model; else the worker itself does.
    IN_ENGINE: bool

    def model_fn(self, model_dir: str, name: str | None = None) -> Any:
        """Loads the model in `model_dir`. Raises `engine.errors.EngineError` with the reason."""

    def transform_fn(
        self,
        model: Any,
        body: bytes | bytearray | str,
        content_type: str | None,
        accept: str | None,
        timeout_s: float | None = None,
    ) -> tuple[bytes, str]:
        """The answer's bytes and content type. Raises `EngineError`."""


def choose(model_dir: str) -> Handler:
    """Raises `ArtifactError` for what no handler serves."""
    from handlers import kogpt2

    for script in USER_SCRIPTS:
        if (Path(model_dir) / script).exists():
            raise ArtifactError(f"the model brings {script}; own scripts are not supported yet")
    return kogpt2
