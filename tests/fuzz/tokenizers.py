"""Foreign tokenizers, read as by the engine: by libraries in C++ and Rust, in a sandbox."""

from __future__ import annotations

import atexit
import json
import tempfile
from functools import cache
from pathlib import Path

from common.errors import ArtifactError
from engine.sandbox import Limits, Sandbox
from serving.errors import BadRequest
from tests.engine.hugging_face import KINDS, train_tokenizer
from tests.engine.models import spiece
from tests.fuzz.tokenizer_attempts import attempts

JSON, SETTINGS, SENTENCEPIECE = NAMES = ("tokenizer.json", "tokenizer_config.json", "spiece")
WIDE_S = 60.0
OUTCOMES = {"used", "ArtifactError", "InvalidRequest", "PromptTooLong", "EngineError", "ended"}
BESIDE = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "extra_special_tokens": ["<a>", {"content": "<b>", "special": False}],
    "additional_special_tokens": {"x": "<c>"},
    "added_tokens_decoder": {"9": {"content": "<d>", "normalized": True}, "10": "<e>"},
}


@cache
def made(name: str) -> list[bytes]:
    """Valid files, from which hostile ones are made."""
    if name == JSON:
        return [train_tokenizer(kind, 200).to_str().encode() for kind in KINDS]
    if name == SETTINGS:
        return [json.dumps(BESIDE).encode(), b"{}"]
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    model = ModelProto.FromString(spiece())
    model.normalizer_spec.precompiled_charsmap = b""  # most of the file, and what is cut off
    return [model.SerializeToString()]


class Tokenizer:
    """A target: the file of this name, read in a sandbox that is replaced when it ends."""

    def __init__(self, name: str) -> None:
        self._name = f"tokenizer.{name}" if name == SENTENCEPIECE else name
        self._child: Sandbox | None = None

    def __call__(self, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self._name
            path.write_bytes(data)
            if self._name == SETTINGS:
                path = path.with_name(JSON)
                path.write_bytes(made(JSON)[0])
            if (outcome := self._outcome(path)) != "used":
                raise BadRequest(f"a tokenizer that cannot be used: {outcome}")

    def _outcome(self, path: Path) -> str:
        if self._child is None or self._child.pid is None:
            self._child = Sandbox(attempts, what=path.name, limits=Limits(256))
            atexit.register(self._child.kill)
            self._child.ready(WIDE_S)
        try:
            outcome: str = self._child.call(str(path), timeout_s=WIDE_S)
        except ArtifactError as error:  # it crashed, took too long or too much
            ended = self._child.pid is None or "MiB" in error.message
            outcome = "ended" if ended else error.message
        assert outcome in OUTCOMES
        return outcome
