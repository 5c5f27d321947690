"""The servers that switch: ours, and llama.cpp's, with adapters or as a router.

The router does what llama-swap does: it starts a process for a model that is requested, and ends
that of the least recently used one where there would be more than so many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import random_model
from benchmarks.contenders.llama_server import LlamaServer
from benchmarks.server import Server
from engine.http.client import EngineClient

CONTEXT = 512  # tokens of all requests of a model of llama.cpp's together


class Ours(Server):
    """Over a folder of models, with a small budget."""

    def __init__(
        self,
        store: Path,
        log: Path,
        engine_mib: int,
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        environment = {"ENGINE_MEMORY_MIB": str(engine_mib), **(environment or {})}
        super().__init__(store, log, environment=environment, **more)
        self._engine = EngineClient(str(self.run_dir / "engine.sock"))

    def states(self) -> dict[str, str]:
        """By model, one of `clients.STATES`; one that is not named is cold.

        A server that knows no residency has models loaded, or not.
        """
        rows = self._engine.request("GET", "/models")["models"]
        # To the engine a model is called what the gateway calls it, "#" and its id.
        return {row["name"].rpartition("#")[0]: row.get("residency", "hot") for row in rows}

    def stream(self, model: str, ids: list[int], new_tokens: int) -> tuple[str, dict[str, Any]]:
        """The path and the body of a call that answers with a stream."""
        parameters = {"max_new_tokens": new_tokens}
        body = {"inputs": random_model.text_of(ids), "parameters": parameters, "stream": True}
        return f"/predictions/{model}", body

    def token(self, line: bytes) -> str | None:
        """The text of a line of the stream; None if it brings no token."""
        event = json.loads(line)
        return event["text"] if "token" in event else None


class LlamaStreams(LlamaServer):
    def stream(self, model: str, ids: list[int], new_tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"model": model, "prompt": ids, "n_predict": new_tokens, "stream": True}
        body |= {"temperature": 0, "return_tokens": True, "ignore_eos": True}
        return "/completion", body | {"cache_prompt": False}  # ours keeps no prompts either

    def token(self, line: bytes) -> str | None:
        event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        return event["content"] if event.get("tokens") else None

    def states(self) -> dict[str, str]:
        return {}


class LlamaAdapters(LlamaStreams):
    """`adapters` are GGUF files by name. Requests to different ones share no batch."""

    def __init__(self, base: Path, adapters: Mapping[str, Path], rows: int, log: Path) -> None:
        self._numbers = {name: number for number, name in enumerate(adapters)}
        files = ",".join(map(str, adapters.values()))
        options = {"model": base, "lora": files, "ctx-size": CONTEXT, "parallel": rows}
        super().__init__(options, log)

    def stream(self, model: str, ids: list[int], new_tokens: int) -> tuple[str, dict[str, Any]]:
        path, body = super().stream(model, ids, new_tokens)
        return path, body | {"lora": [{"id": self._numbers[model], "scale": 1.0}]}


class Router(LlamaStreams):
    """`models_dir` has the GGUF files; a model is called what its file is, without the suffix."""

    def __init__(self, models_dir: Path, at_once: int, rows: int, log: Path) -> None:
        options = {"models-dir": models_dir, "models-max": at_once}
        super().__init__({**options, "ctx-size": CONTEXT, "parallel": rows}, log)

    def states(self) -> dict[str, str]:
        rows = (self.get("/v1/models") or {}).get("data", [])
        return {row["id"]: "hot" for row in rows if row["status"]["value"] == "loaded"}
