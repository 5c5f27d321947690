"""Finds files of a model that are not read, because their names are only almost right."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from common.model_files import ADAPTER, DELTA, MANIFEST, SYMBOL, programs, visible

# Files that are read if they are there: without them a model loads, but answers otherwise.
READ = (
    "config.json", "generation.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "serving.json",
    ADAPTER, DELTA, SYMBOL, "model-shapes.json", MANIFEST,
)  # fmt: skip
FOLDERS = ("code", "mar-inf")  # in lower case; files of others are the model's own
# What programs add to the name of a second download or a copy.
COPY = re.compile(r"( ?\(\d+\)| ?-? (copy|복사본)( ?\(?\d+\)?)?)+(?=\.)")
MIN_SIMILARITY = 0.9  # of names: generations.json, but not quantization_config.json


def misnamed(folder: Path) -> list[str]:
    """Return a sentence for each file that is not read because of its name: `Config.json`."""
    with contextlib.suppress(OSError):
        return list(_sentences([*_paths(folder)]))
    return []


def _paths(folder: Path) -> Iterator[str]:
    for path in visible(folder):
        if path.name.casefold() in FOLDERS and path.is_dir():
            yield from (f"{path.name}/{file.name}" for file in visible(path))
        else:
            yield path.name


def _sentences(paths: list[str]) -> Iterator[str]:
    scripts = [f"{at}{name}" for name in programs(os.environ) for at in ("code/", "")]
    read = {name.casefold(): name for name in (*READ, *scripts)}
    for path in paths:
        if path in read.values():
            continue
        plain = COPY.sub("", path.replace("\\", "/").casefold()).removesuffix(".txt")
        meant = read.get(plain) or ("\\" in path and read.get(plain.rpartition("/")[2]))
        if not meant:
            close = get_close_matches(plain, read, 1, MIN_SIMILARITY)
            meant = next((read[name] for name in close if read[name] not in paths), "")
        if meant:
            yield f"{path!r} is not read: {meant} is the name of such a file"
