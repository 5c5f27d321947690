"""A handler service that attempts, in a worker, what an exploited library could do."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.handlers.user_code.confinement.confined import outcome


class Attempts:
    def initialize(self, context: Any) -> None:
        self._folder = Path(context.system_properties["model_dir"])

    def handle(self, data: Any, context: Any) -> list[bytes]:
        model, parent = self._folder, os.getppid()
        attempts: dict[str, Callable[[], object]] = {
            "reads its model": (model / "model.onnx").read_bytes,
            "reads the machine's state": Path("/proc/meminfo").read_text,
            "has threads": threading.Thread(target=int).start,
            "reads another model": (model.parent / "다른 모델").read_text,
            "changes its model": lambda: (model / "model.onnx").write_bytes(b""),
            "writes beside its model": lambda: (model.parent / "new").write_text("x"),
            "reads its parent's environment": Path(f"/proc/{parent}/environ").read_bytes,
            "uses the network": socket.socket,
            "connects to a socket of the server": lambda: socket.socket(socket.AF_UNIX),
        }
        outcomes = {name: outcome(function) for name, function in attempts.items()}
        return [json.dumps({**outcomes, "user": os.geteuid(), "groups": os.getgroups()}).encode()]

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...
