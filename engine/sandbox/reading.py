"""The sandboxes of one load, which end when nobody waits for it any more."""

from __future__ import annotations

import threading
from typing import Any

from common.errors import ArtifactError, Cancelled, EngineUnavailable
from engine.sandbox import Limits, Sandbox, again

# Beyond what a gateway waits for a load by default: whoever waits gives up first.
TIMEOUT_S = 600.0


class Reading:
    """`run` is an `engine.prepared.manifest.Run`; `give_up`, from any thread, ends what it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Sandbox | None = None
        self.given_up = False

    def run(self, target: Any, *arguments: Any, what: str, limits: Limits) -> Any:
        """Raises what `engine.sandbox.Sandbox.call` does, and `Cancelled`."""

        def once() -> Any:
            self.check()
            with Sandbox(target, *arguments, what=what, limits=limits) as child:
                with self._lock:
                    self._child = child
                try:
                    self.check()
                    return child.ready(TIMEOUT_S)
                except (ArtifactError, EngineUnavailable):
                    self.check()  # it ended because of that
                    raise

        return again(once)

    def check(self) -> None:
        """Raises `Cancelled` once it is given up."""
        if self.given_up:
            raise Cancelled("nobody waits for the load any more")

    def give_up(self) -> None:
        with self._lock:
            self.given_up = True
            child = self._child
        if child is not None:
            child.kill()
