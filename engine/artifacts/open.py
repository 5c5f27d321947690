"""Opens the folder of a model, whatever kind of artifact it has."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import ArtifactError
from engine.artifacts import hugging_face, v1
from engine.artifacts.artifact import Artifact
from engine.artifacts.files import readable
from engine.artifacts.generation_config import read_generation


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Check the folder of a KoGPT2 v1 model or Hugging Face's GPT-2. Raises `ArtifactError`."""
    folder = Path(path)
    with readable("the model's folder"):
        if not folder.is_dir():
            raise ArtifactError("there is no such model folder")
        generation = read_generation(folder)
        read = hugging_face.read if hugging_face.is_in(folder) else v1.read
        return read(folder, generation)
