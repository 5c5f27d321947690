"""A worker's settings, read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    engine_socket: str = field(
        default="/run/kogpt2/engine.sock",
        metadata={"variable": "ENGINE_SOCKET", "help": "the engine's unix socket"},
    )
    request_timeout_s: float = field(
        default=60.0,
        metadata={
            "variable": "REQUEST_TIMEOUT_S",
            "help": "an answer that takes longer is given up with 504 (SageMaker waits 60 s)",
        },
    )
    probe_secret: str = field(
        default="",
        metadata={
            "variable": "PROBE_SECRET",
            "help": "`serve` sets it: who knows it may ask a worker how its load went",
        },
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        return cls(
            engine_socket=environment.get("ENGINE_SOCKET", cls.engine_socket),
            probe_secret=environment.get("PROBE_SECRET", ""),
            request_timeout_s=float(environment.get("REQUEST_TIMEOUT_S", cls.request_timeout_s)),
        )
