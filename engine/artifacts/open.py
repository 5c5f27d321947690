"""Opens the folder of a model, whatever kind of artifact it has."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import ArtifactError
from engine.artifacts import hugging_face, v1
from engine.artifacts.artifact import Artifact
from engine.artifacts.files import why
from engine.artifacts.generation_config import read_generation


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Check the folder of a KoGPT2 v1 model or Hugging Face's GPT-2. Raises `ArtifactError`."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            raise ArtifactError(f"there is no model folder {folder}")
        generation = read_generation(folder)
        if hugging_face.is_in(folder):
            return hugging_face.read(folder, generation)
        return v1.read(folder, generation)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {why(error)}") from None
