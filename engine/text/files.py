"""The files of a tokenizer and its chat template, read once and hashed as read."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ArtifactError
from engine.artifacts.files import parse_json, read_file

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
MAX_TOKENIZER_BYTES = 128 << 20  # KoGPT2's take 1 and 3 MB

Files = Mapping[str, bytes]  # by name


def read_files(tokenizer_file: Path) -> Files:
    """The tokenizer and the files beside it, without byte order marks. Raises `ArtifactError`."""
    try:
        content = read_file(tokenizer_file, MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        raise ArtifactError(f"there is no {tokenizer_file.name}") from None
    files = {tokenizer_file.name: content}
    for name in (CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE):
        with suppress(FileNotFoundError):
            files[name] = read_file(tokenizer_file.with_name(name))
    return {name: content.removeprefix(codecs.BOM_UTF8) for name, content in files.items()}


def json_in(files: Files, name: str) -> dict[str, Any]:
    """Parse the JSON object in one of the files, `{}` without the file. Raises `ArtifactError`."""
    return parse_json(files[name], name) if name in files else {}
