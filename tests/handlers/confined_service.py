"""A handler service that attempts, in a worker, what an exploited library could do.

`tests.handlers.user_code.confinement.confined` attempts all that a `Confinement` prevents; here is
one attempt for each of its arguments.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.handlers.user_code.confinement.confined import outcome


class Attempts:
    def initialize(self, context: Any) -> None:
        self._folder = Path(context.system_properties["model_dir"])

    def handle(self, data: Any, context: Any) -> list[bytes]:
        model = self._folder
        attempts: dict[str, Callable[[], object]] = {
            "reads its model": (model / "model.onnx").read_bytes,
            "reads another model": (model.parent / "다른 모델").read_text,
            "changes its model": lambda: (model / "model.onnx").write_bytes(b""),
            "uses the network": socket.socket,
        }
        outcomes = {name: outcome(function) for name, function in attempts.items()}
        return [json.dumps({**outcomes, "user": os.geteuid(), "groups": os.getgroups()}).encode()]

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...
