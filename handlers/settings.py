"""A worker's settings, read from the environment once."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings import setting


@dataclass(frozen=True)
class Settings:
    engine_socket: str = setting(
        "ENGINE_SOCKET", "/run/kogpt2/engine.sock", "the engine's socket; `serve` sets it"
    )
    request_timeout_s: float = setting(
        "REQUEST_TIMEOUT_S",
        60.0,
        "an answer that takes longer is given up with 504 (SageMaker waits 60 s)",
    )
    load_timeout_s: float = setting(
        "LOAD_TIMEOUT_S", 300.0, "a script that takes longer to load its model is stopped"
    )
    probe_secret: str = setting(
        "PROBE_SECRET",
        "",
        "`serve` sets it: the gateway's secret for reading the outcome of a load from a worker",
    )
    script_memory_mib: int = setting(
        "SCRIPT_MEMORY_MIB",
        0,
        "memory of each process of a model's script; 0: what the container has",
    )
    script_isolation: bool = setting(
        "SCRIPT_ISOLATION",
        True,
        "confine scripts and workers of graphs (docs/operate/security.md)",
    )
    script_paths: str = setting(
        "SCRIPT_PATHS", "", "colon-separated folders that scripts may read, too"
    )
    script_network: bool = setting(
        "SCRIPT_NETWORK", True, "whether a script may use the network, the server's ports included"
    )
    allow_model_requirements: bool = setting(
        "ALLOW_MODEL_REQUIREMENTS",
        False,
        "install the packages in a model's `code/requirements.txt`",
    )
