"""A worker's settings, read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import InvalidRequest


def _setting(variable: str, default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"variable": variable, "help": help_text})


@dataclass(frozen=True)
class Settings:
    engine_socket: str = _setting(
        "ENGINE_SOCKET", "/run/kogpt2/engine.sock", "the engine's unix socket"
    )
    request_timeout_s: float = _setting(
        "REQUEST_TIMEOUT_S",
        60.0,
        "an answer that takes longer is given up with 504 (SageMaker waits 60 s)",
    )
    load_timeout_s: float = _setting(
        "LOAD_TIMEOUT_S", 300.0, "a script that takes longer to load its model is stopped"
    )
    probe_secret: str = _setting(
        "PROBE_SECRET", "", "`serve` sets it: who knows it may ask a worker how its load went"
    )
    script_memory_mib: int = _setting(
        "SCRIPT_MEMORY_MIB",
        0,
        "memory that each process of a model's own script may take; 0: what the container has",
    )
    script_isolation: bool = _setting(
        "SCRIPT_ISOLATION",
        True,
        "keep a model's own script from the server's files, sockets and processes",
    )
    script_paths: str = _setting(
        "SCRIPT_PATHS", "", "more folders that every script may read, separated by colons"
    )
    script_network: bool = _setting(
        "SCRIPT_NETWORK", True, "whether a script may use the network, the server's ports included"
    )
    allow_model_requirements: bool = _setting(
        "ALLOW_MODEL_REQUIREMENTS",
        False,
        "install what a model's `code/requirements.txt` asks for, into a folder of that model",
    )
    max_answer_bytes: int = _setting(
        "MMS_MAX_RESPONSE_SIZE",
        104_857_600,
        "`serve` sets it: the longest answer that Multi Model Server passes on",
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Raises `InvalidRequest` that names the variable."""
        return cls(
            **{
                f.name: _parse(f.metadata["variable"], environment[f.metadata["variable"]], f.type)
                for f in fields(cls)
                if environment.get(f.metadata["variable"])
            }
        )


def _parse(variable: str, text: str, kind: Any) -> Any:
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
    except ValueError:
        raise InvalidRequest(f"{variable} is {text!r}, must be a number") from None
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise InvalidRequest(f"{variable} is {text!r}, must be true or false")
        return text.lower() == "true"
    return text
