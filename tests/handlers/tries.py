"""A handler service that tries, within a worker, what a library's fault would let a model do."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from tests.handlers.user_code.confinement.confined import outcome


class Tries:
    def initialize(self, context: Any) -> None:
        self._folder = Path(context.system_properties["model_dir"])

    def handle(self, data: Any, context: Any) -> list[bytes]:
        model, parent = self._folder, os.getppid()
        tried = {
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
        found = {name: outcome(function) for name, function in tried.items()}
        return [json.dumps({**found, "user": os.geteuid(), "groups": os.getgroups()}).encode()]

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...
