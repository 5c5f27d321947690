"""Recognizes folders that are models by their files, for store, handlers and engine.

Imports no large module.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

# Hugging Face's weights, whole or in shards (`<name>.index.json`). KoGPT2 v1's end with PARAMS.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
PARAMS = ".params"
# Tensors in, tensors out: an MXNet symbol checkpoint, an ONNX graph, also in a version's folder.
SYMBOL, GRAPH = "model-symbol.json", "model.onnx"
BASE_NAME = "_name_or_path"  # in config.json: the model that a fine-tune was trained on
ADAPTER = "adapter_config.json"  # PEFT writes it beside adapter_model.safetensors
DELTA = "delta.safetensors"  # what a fine-tune adds to its base, by kogpt2 convert --to delta
MANIFEST = "MAR-INF/MANIFEST.json"  # in Multi Model Server's archives
DEFAULT_PROGRAM = "inference.py"  # the SageMaker Inference Toolkit's default

TENSORS = re.compile(rf"(model/)?{re.escape(SYMBOL)}|([0-9]+/)?{re.escape(GRAPH)}")
WEIGHTS = re.compile(
    rf"(?!adapter_)[^/]*({re.escape(PARAMS)}|"
    rf"({'|'.join(map(re.escape, WEIGHT_FILES))})(\.index\.json)?)"
)


def is_hidden(path: str) -> bool:
    """Return whether a file is no part of a model: it, or a folder it is in, has a dot name.

    macOS puts a `._NAME` beside each file that has attributes, in a zip into `__MACOSX`.
    """
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """Return what is in a folder and not hidden, sorted. Raises `OSError`."""
    paths = (path for path in folder.iterdir() if not is_hidden(path.name))
    return sorted(path for path in paths if fnmatchcase(path.name, pattern))


def programs(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the default scripts of a model, in order of precedence."""
    return tuple(filter(None, (environment.get("SAGEMAKER_PROGRAM"), DEFAULT_PROGRAM)))


def script_paths(named: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The possible paths of the script `module`, `path/module.py` or `module:function`, in order.

    They are in `SAGEMAKER_SUBMIT_DIRECTORY`, in `code/`, or beside the weights; with the path as
    given, or without it, as archivers store it.
    """
    submitted = environment.get("SAGEMAKER_SUBMIT_DIRECTORY", "").removeprefix("file://")
    folders = [submitted] if submitted and "://" not in submitted else []
    module = named.partition(":")[0].removesuffix(".py") + ".py"
    return tuple(
        posixpath.normpath(posixpath.join(folder, name))
        for name in dict.fromkeys((module, posixpath.basename(module)))
        for folder in (*folders, "code", "")
    )


def is_model(
    paths: Iterable[str],
    handler: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Return whether a folder is a model, by the paths of its files relative to it.

    `handler` is the handler that the load request names, if any.
    """
    everywhere = filter(None, (environment.get("SAGEMAKER_HANDLER"), *programs(environment)))
    named = (handler,) if handler else everywhere
    scripts = {path for name in named for path in script_paths(name, environment)} | {MANIFEST}
    return any(
        path in scripts
        or path in (ADAPTER, DELTA)
        or WEIGHTS.fullmatch(path)
        or TENSORS.fullmatch(path)
        for path in paths
        if not is_hidden(path)
    )


def is_adapter(folder: Path) -> bool:
    """Return whether a folder has an adapter, without weights of a whole model beside it.

    False if the folder cannot be read.
    """
    return _without_weights(ADAPTER, folder)


def is_delta(folder: Path) -> bool:
    """Return whether a folder has a delta, without weights of a whole model beside it.

    False if the folder cannot be read.
    """
    return _without_weights(DELTA, folder)


def _without_weights(name: str, folder: Path) -> bool:
    try:
        names = {path.name for path in visible(folder) if path.is_file()}
    except OSError:
        return False
    return name in names and not any(map(WEIGHTS.fullmatch, names))


# Files that cannot be served, by their suffixes, with an explanation.
FORMATS: dict[str | tuple[str, ...], str] = {
    ".gguf": "GGUF is llama.cpp's format",
    ".ckpt": "a .ckpt is a checkpoint of a training",
    (".pt", ".pth"): "a .pt file says neither what its weights are of nor how text is cut",
    ".onnx": f"an ONNX graph is called {GRAPH}",
    (".tar", ".tgz", ".tar.bz2", ".tar.xz", ".zip"): "archives are NAME.tar.gz or NAME.mar",
    (".h5", ".msgpack"): "weights of TensorFlow and Flax are not read",
}
SERVED = f"a folder with config.json, {WEIGHT_FILES[0]} and tokenizer.json is (save_pretrained)"
CHECKPOINT = re.compile(r"(checkpoint-([0-9]+))/")


def why_no_model(paths: Iterable[str], links: int = 0) -> str:
    """Explain why the files are no model, and what would be; `links` counts skipped links."""
    names = sorted(paths)
    archives = {path for path in names if path.endswith((".tar.gz", ".mar"))}
    folders = sorted(model_folders(names) | archives)
    steps = {int(m[2]): m[1] for path in names if (m := CHECKPOINT.match(path))}
    if steps:
        last = steps[max(steps)]
        return (
            f"it holds checkpoints of a training only: serve one of them ({last}), or save the"
            " model into the folder itself (trainer.save_model)"
        )
    if any(path.startswith(("snapshots/", "blobs/", "refs/")) for path in names):
        return (
            "it is the Hugging Face hub's cache, where files are links: download it with"
            " hf download REPOSITORY --local-dir FOLDER"
        )
    if any(path.startswith("adapter_") for path in names):
        return (
            f"it holds weights of an adapter, but no {ADAPTER} beside them: peft's save_pretrained"
            " writes both"
        )
    if folders:
        return f"its models are in it: {', '.join(folders[:5])}"
    for endings, reason in FORMATS.items():
        if any(path.endswith(endings) for path in names):
            return f"{reason}; {SERVED}" if endings != ".onnx" else reason
    if links:
        return f"{links} of its files are links, which are not followed: copy it with cp -rL"
    return f"{SERVED}; it holds {', '.join(names[:5])}"


def model_folders(paths: Iterable[str]) -> set[str]:
    """Return the topmost folders that are models, by the paths of all files of a store."""
    folders = {
        parent
        for path in paths
        for parent in parents(path)
        if is_model((path.removeprefix(parent + "/"),))
    }
    return {folder for folder in folders if folders.isdisjoint(parents(folder))}


def parents(path: str) -> list[str]:
    """The parents of a path: `a` and `a/b` of `a/b/c`."""
    return [path[:i] for i, character in enumerate(path) if character == "/"]
