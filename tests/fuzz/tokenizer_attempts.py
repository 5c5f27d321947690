"""The part of the tokenizers' fuzzing that runs in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import EngineError
from engine.artifacts.artifact import Artifact
from engine.artifacts.config import GPT2Config
from engine.text import child as text_child
from engine.text.table import Table

CONFIG = GPT2Config(700, 64, 2, 4, 256, 128)


def attempts() -> Callable[[str], str]:
    """Opens and uses a tokenizer in each call; returns the outcome."""

    def attempt(path: str) -> str:
        try:
            file = Path(path)
            artifact = Artifact(file.parent, CONFIG, {}, file)
            child = text_child.serve(*text_child.source_of(artifact))
            table = Table.from_json(json.loads(json.dumps(child("about")))["table"])
            ids: Any = child("encode", "오늘은 날씨가 <s> 🙂")
            detokenizer = table.detokenizer(ids, lambda ids: child("decode", ids))
            texts = [detokenizer.feed(token) for token in [*ids, 0, 699]] + [detokenizer.flush()]
            pieces = [table.piece(token) for token in [*ids, 5]]
        except EngineError as error:
            error.message.encode("utf-8")
            return error.type
        return "used" if len(texts) == len(ids) + 3 and len(pieces) > 1 else "other texts"

    return attempt
