"""KoGPT2 v1's artifacts: `*.params`, by Gluon's `save_parameters`, and `*.spiece`.

KoGPT2's release for PyTorch (`pytorch_kogpt2_*.params`) is a state_dict of transformers' GPT-2.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import ArtifactError
from common.model_files import visible
from engine.artifacts import artifact
from engine.artifacts.artifact import EMBEDDING, OUTPUT, POSITIONS, Artifact, ConfigFile
from engine.artifacts.files import read_json
from engine.artifacts.generation_config import Generation
from engine.artifacts.hugging_face import canonical_names, head_name
from engine.artifacts.read_params import index_params
from engine.artifacts.read_torch import index_torch, is_torch

DEFAULT_HEAD_SIZE = 64


def read(folder: Path, generation: Generation) -> Artifact:
    """Read `*.params`, `*.spiece` and, if it exists, `config.json`. Raises `ArtifactError`."""
    params_file, spiece_file = only_file(folder, "*.params"), only_file(folder, "*.spiece")
    file = params_file.name
    if is_torch(params_file):
        stored = index_torch(params_file)
        artifact.check_no_classifier(stored, file)
        weights, prefix = canonical_names(stored, file)
        if head := stored.get(head_name(prefix)):
            weights[OUTPUT] = head
    else:
        weights = index_params(params_file)
        artifact.check_no_classifier(weights, file)
        # A fine-tune that was saved from a wrapper block has a prefix in front of all keys.
        prefix = artifact.shared_prefix(weights, EMBEDDING, POSITIONS, file, "KoGPT2 model")
        weights = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    sizes = artifact.sizes(weights, file)
    heads = max(sizes["units"] // DEFAULT_HEAD_SIZE, 1)
    given = ConfigFile(read_json(folder / artifact.CONFIG_FILE), artifact.V1_NAMES)
    config = given.config(sizes, file, heads=heads, activation="gelu", aliases={})
    # v1 files carry the tied output projection a second time.
    if OUTPUT in weights and weights[OUTPUT].shape != weights[EMBEDDING].shape:
        raise ArtifactError(
            f"{file}: {OUTPUT} does not have the shape of the embedding it is tied to"
        )
    if artifact.differ(folder, weights.get(OUTPUT), weights[EMBEDDING]):
        raise ArtifactError(
            f"{file}: {OUTPUT} differs from {EMBEDDING}, to which KoGPT2's is tied: save the model"
            " with one, or serve it as a Hugging Face folder with tie_word_embeddings false"
        )
    artifact.check_weights(weights, config, file)
    return Artifact(folder, config, weights, artifact.check_plain(spiece_file), generation)


def only_file(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern. Raises `ArtifactError` for none and for several."""
    paths = visible(folder, pattern)
    if len(paths) != 1:
        count = "no" if not paths else f"{len(paths)}"
        raise ArtifactError(
            f"the folder holds {count} {pattern} files, must hold exactly one"
            f" (found: {artifact.list_files(folder)})"
        )
    return paths[0]
