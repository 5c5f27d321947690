"""Which files make a model of tensors, and where they lie. Imports nothing that is large."""

from __future__ import annotations

from pathlib import Path

from common.errors import ArtifactError
from common.model_files import GRAPH, SYMBOL

PARAMS, SHAPES = "model-0000.params", "model-shapes.json"
# A graph that lies beside these is a companion, not what the model is served by.
OTHER_WEIGHTS = ("*.params", "*.safetensors", "*.spiece", "pytorch_model*.bin")


def is_symbol(model_dir: str) -> bool:
    """Whether `model_dir` holds an MXNet symbol checkpoint; KoGPT2's exports have a tokenizer."""
    folder = Path(model_dir)
    return any((folder / sub / SYMBOL).exists() for sub in ("", "model")) and not any(
        folder.glob("*.spiece")
    )


def symbol_folder(model_dir: str) -> Path:
    """Where the checkpoint's files lie: the artifact's root, or `model/`.

    Raises `ArtifactError` that names what is missing.
    """
    root = Path(model_dir)
    folder = root if (root / SYMBOL).exists() else root / "model"
    missing = [name for name in (SYMBOL, PARAMS, SHAPES) if not (folder / name).exists()]
    if missing:
        raise ArtifactError(
            f"{' and '.join(missing)} missing: a symbol checkpoint is {SYMBOL}, {PARAMS} and"
            f' {SHAPES}, such as [{{"shape": [1, 2], "name": "data"}}]'
        )
    return folder


def is_graph(model_dir: str) -> bool:
    """Whether `model_dir` holds an ONNX model, and none for whom that is only a companion."""
    folder = Path(model_dir)
    if any(True for pattern in OTHER_WEIGHTS for _ in folder.glob(pattern)):
        return False
    return (folder / GRAPH).exists() or bool(_versions(folder))


def find_graph(model_dir: str) -> tuple[Path, str]:
    """The graph's file and its version: the highest. Raises `ArtifactError` for two models."""
    folder = Path(model_dir)
    if (folder / GRAPH).exists():
        return folder / GRAPH, "1"
    versions = _versions(folder)
    if not versions:
        raise ArtifactError(f"there is no {GRAPH} and no 1/{GRAPH}")
    models = {path.parent.parent for _, path in versions}
    if len(models) > 1:
        names = ", ".join(sorted(model.name for model in models))
        raise ArtifactError(f"an artifact is one model, but this one holds {names}")
    version, path = versions[-1]
    return path, str(version)


def _versions(folder: Path) -> list[tuple[int, Path]]:
    """Version and file of each `1/model.onnx`, or else `name/1/model.onnx`."""
    for pattern in (f"*/{GRAPH}", f"*/*/{GRAPH}"):
        found = [path for path in folder.glob(pattern) if path.parent.name.isdecimal()]
        if found:
            return sorted((int(path.parent.name), path) for path in found)
    return []
