"""The engine's settings, read from the environment once."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest, SettingError
from common.memory import MIB, memory_limit_bytes
from common.settings import setting
from engine.backends import DEVICES, nvidia, precisions
from engine.budget import budget_bytes


@dataclass(frozen=True)
class Settings:
    """The settings of the engine. Raises `SettingError` for values that exclude each other."""

    socket: str = setting(
        "ENGINE_SOCKET",
        "/run/kogpt2/engine.sock",
        "the engine's unix socket; `serve` sets it, in `RUN_DIR`",
    )
    backend: str = setting(
        "ENGINE_BACKEND",
        "mxnet",
        "what computes: on a CPU `mxnet`, whose operator runs the native library, or `native`, the"
        " library without MXNet; on a GPU `mxnet` or `onnxruntime`",
    )
    precision: str = setting(
        "ENGINE_PRECISION",
        "",
        "on a CPU `int8` (the default) or `fp32`, which gives the text of the guides' loop; on a"
        " GPU mxnet has `fp32`, onnxruntime `fp16`",
    )
    device: str = setting("ENGINE_DEVICE", "cpu", "`cpu` or `gpu`")
    memory_mib: int = setting(
        "ENGINE_MEMORY_MIB",
        0,
        "memory for weights and K/V caches; 0: the container's less a quarter, or the GPU's less"
        " an eighth",
    )
    overcommit: int = setting(
        "ENGINE_OVERCOMMIT",
        8,
        "how many times that memory the weights of all loaded models may take; idle ones stay on"
        " the disk",
    )
    max_rows: int = setting("ENGINE_MAX_ROWS", 16, "sequences of one model that share a step")
    max_queue: int = setting(
        "ENGINE_MAX_QUEUE", 256, "requests of one model that may wait; beyond it 503"
    )
    prefix_cache_mib: int = setting(
        "ENGINE_PREFIX_CACHE_MIB",
        512,
        "memory, not needed otherwise, of the prefix cache (docs/deploy/containers.md); 0: none",
    )
    speculation: str = setting(
        "ENGINE_SPECULATION",
        "off",
        "`auto`: on a CPU a pass also checks guesses of the next tokens; texts are the same",
    )
    cache_dir: str = setting(
        "ENGINE_CACHE_DIR", "", "where prepared (quantized) models are stored; empty: beside each"
    )
    cache_max_mib: int = setting(
        "ENGINE_CACHE_MAX_MIB",
        20_480,
        "disk that `ENGINE_CACHE_DIR` may take; the least recently loaded go",
    )

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise SettingError(f"ENGINE_DEVICE is {self.device!r}, must be cpu or gpu")
        try:
            known = precisions(self.backend, self.device)
        except InvalidRequest as error:
            raise SettingError(f"ENGINE_BACKEND: {error.message}") from None
        if self.precision and self.precision not in known:
            raise SettingError(
                f"ENGINE_PRECISION is {self.precision!r}, must be one of {known}"
                f" for {self.backend} on the {self.device}"
            )
        if self.speculation not in ("auto", "off"):
            raise SettingError(f"ENGINE_SPECULATION is {self.speculation!r}, must be auto or off")
        for name in ("overcommit", "max_rows", "max_queue"):
            if getattr(self, name) < 1:
                raise SettingError(f"ENGINE_{name.upper()} must be at least 1")

    @property
    def budget_bytes(self) -> int:
        """The memory budget. Raises `InvalidRequest` if the device is a GPU and there is none."""
        if self.memory_mib:
            return self.memory_mib * MIB
        if self.device == "gpu":
            return nvidia.default_budget_bytes()
        return budget_bytes(memory_limit_bytes())
