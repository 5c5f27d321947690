"""What the tests of hostile tokenizers run in a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common.errors import EngineError
from engine.artifacts.config import GPT2Config
from engine.artifacts.generation_config import Generation
from engine.text import child as text_child

CONFIG = GPT2Config(700, 64, 2, 4, 256, 128)


def attempts() -> Callable[[str], str]:
    """Opens tokenizers, one a call, and uses each; says what came of it."""

    def attempt(path: str) -> str:
        try:
            child = text_child.serve(path, asdict(CONFIG), Generation().to_json())
            ids: Any = child("encode", "오늘은 날씨가 <s> 🙂")
            tokens = [(0, token, None, [token, 5]) for token in [*ids, 0, 699]]
            found = child("write", [(0, ids, ["끝"])], [], [*tokens, (0, 1, "length", [])])
        except EngineError as error:
            error.message.encode("utf-8")
            return error.type
        return "used" if len(found) == len(tokens) + 1 else "other texts"

    return attempt
