"""The file of a delta, made of two small models, and how the engine reads it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

from common.model_files import DELTA
from engine.artifacts.open import open_artifact
from engine.native.delta import open_delta
from engine.native.delta_folder import read_folder
from tests.engine.deltas import fine_tuned
from tests.engine.models import make_artifact

_kept = contextlib.ExitStack()


@cache
def _folder() -> Path:
    """A folder with a delta, there until this process ends."""
    root = Path(_kept.enter_context(tempfile.TemporaryDirectory()))
    base = make_artifact(root / "바탕", layers=1, units=32, heads=2, vocab=200, max_length=8)
    whole = fine_tuned(root / "시", base)
    with contextlib.closing(open_delta(open_artifact(whole), open_artifact(base), root)) as delta:
        shutil.copyfile(delta.file.path, whole / DELTA)
    (whole / "kogpt2.params").unlink()
    return whole


@cache
def seeds() -> list[bytes]:
    return [(_folder() / DELTA).read_bytes()]


def target(data: bytes) -> None:
    seeds()  # read before the file is overwritten
    (_folder() / DELTA).write_bytes(data)
    read_folder(_folder())
