"""Strangers' tokenizers, read where the engine reads them: by libraries in C++ and Rust, in a
process that may crash."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path

from serving.errors import BadRequest
from tests.engine.hugging_face import KINDS, train_tokenizer
from tests.engine.models import spiece
from tests.engine.text.test_child import Tries

JSON, SENTENCEPIECE = "tokenizer.json", "spiece"


def made(name: str) -> list[bytes]:
    """Good ones, from which the others are made."""
    if name == JSON:
        return [train_tokenizer(kind, 200).to_str().encode() for kind in KINDS]
    from sentencepiece import sentencepiece_model_pb2 as protobuf

    model = protobuf.ModelProto.FromString(spiece())
    model.normalizer_spec.precompiled_charsmap = b""  # most of the file, and what is cut off
    return [model.SerializeToString()]


class Tokenizer:
    """A target: the file of this name, read by a process that goes on until one ends it."""

    def __init__(self, name: str) -> None:
        self._name = name if name == JSON else f"tokenizer.{name}"
        self._tries: Tries | None = None

    def __call__(self, data: bytes) -> None:
        if self._tries is None:
            self._tries = Tries()
            atexit.register(self._tries.close)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self._name
            path.write_bytes(data)
            before = self._tries.outcomes["used"]
            self._tries(path)
        if self._tries.outcomes["used"] == before:
            raise BadRequest("a tokenizer that cannot be used")
