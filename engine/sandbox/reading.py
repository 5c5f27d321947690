"""Runs the sandboxes of one load, and kills them when the load is cancelled."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from common.errors import ArtifactError, Cancelled, EngineUnavailable
from engine.sandbox import Limits, Sandbox, again

# Longer than the gateway waits for a load by default, so that its timeout comes first.
TIMEOUT_S = 600.0


class Reading:
    """Runs sandboxes (`run` is an `engine.prepared.manifest.Run`) until `cancel`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Sandbox | None = None
        self.cancelled = False

    def run(
        self, target: Any, *arguments: Any, what: str, limits: Limits, file: Path | None = None
    ) -> Any:
        """Call `target` in a sandbox. Raises as `Sandbox.call`, and `Cancelled`."""

        def once() -> Any:
            self.check()
            with Sandbox(target, *arguments, what=what, limits=limits, file=file) as child:
                with self._lock:
                    self._child = child
                try:
                    self.check()
                    return child.ready(TIMEOUT_S)
                except (ArtifactError, EngineUnavailable):
                    self.check()  # it was killed by `cancel`
                    raise

        return again(once)

    def check(self) -> None:
        """Raise `Cancelled` after `cancel`."""
        if self.cancelled:
            raise Cancelled("the load was cancelled")

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            child = self._child
        if child is not None:
            child.kill()
