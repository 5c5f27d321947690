"""Finds the files of a model of tensors. Imports no large module."""

from __future__ import annotations

from pathlib import Path

from common.errors import ArtifactError
from common.model_files import GRAPH, SYMBOL, visible

PARAMS, SHAPES = "model-0000.params", "model-shapes.json"
# A folder with one of these is no ONNX model, even if a graph is in it: the engine serves it.
OTHER_WEIGHTS = ("*.params", "*.safetensors", "*.spiece", "pytorch_model*.bin")


def is_symbol(model_dir: str) -> bool:
    """Return whether a folder holds an MXNet symbol checkpoint, and no tokenizer as of KoGPT2."""
    folder = Path(model_dir)
    return any((folder / sub / SYMBOL).exists() for sub in ("", "model")) and not visible(
        folder, "*.spiece"
    )


def symbol_folder(model_dir: str) -> Path:
    """Find the checkpoint's folder: the artifact's root, or `model/`. Raises `ArtifactError`."""
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
    """Return whether a folder holds an ONNX graph, and no other weights."""
    folder = Path(model_dir)
    if any(visible(folder, pattern) for pattern in OTHER_WEIGHTS):
        return False
    return (folder / GRAPH).exists() or bool(_versions(folder))


def find_graph(model_dir: str) -> tuple[Path, str]:
    """Find the graph's file and its version, the highest. Raises `ArtifactError` for two models."""
    folder = Path(model_dir)
    if (folder / GRAPH).exists():
        return folder / GRAPH, "1"
    versions = _versions(folder)
    if not versions:
        raise ArtifactError(f"there is no {GRAPH} and no 1/{GRAPH}, must be one of them")
    models = {path.parent.parent for _, path in versions}
    if len(models) > 1:
        names = ", ".join(sorted(model.name for model in models))
        raise ArtifactError(f"an artifact is one model, but this one holds {names}")
    version, path = versions[-1]
    return path, str(version)


def _versions(folder: Path) -> list[tuple[int, Path]]:
    """Find version and file of each `1/model.onnx`, or else of each `name/1/model.onnx`."""
    for pattern in (f"*/{GRAPH}", f"*/*/{GRAPH}"):
        paths = [path for path in folder.glob(pattern) if path.parent.name.isdecimal()]
        if paths:
            return sorted((int(path.parent.name), path) for path in paths)
    return []
