"""The store, the handlers and the engine agree about what is a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ArtifactError
from common.model_files import is_adapter, is_delta, is_model, model_folders, script_paths
from engine.artifacts import hugging_face
from handlers.tensors import files
from handlers.user_code.entry_point import find_script

MODELS = [
    "a.params",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model-symbol.json",
    "model/model-symbol.json",
    "model.onnx",
    "12/model.onnx",
    "inference.py",
    "code/inference.py",
    "MAR-INF/MANIFEST.json",
]
OTHERS = [
    "README.md", "a/b.params", "model.onnx.txt", "x/model.onnx", "service.py",
    "code/x/inference.py", "tokenizer.json", "other/model-symbol.json", "pytorch_model.bin.txt",
]  # fmt: skip


def make(folder: Path, path: str) -> Path:
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_text('{"model": {"handler": "s"}}' if path.endswith(".json") else "x = 1")
    return folder


def is_text_model(folder: Path) -> bool:
    try:
        return hugging_face.is_in(folder) or any(folder.glob("*.params"))
    except ArtifactError:
        return False


@pytest.mark.parametrize("path", [*MODELS, *OTHERS])
def test_what_the_store_offers_is_what_can_be_loaded(tmp_path: Path, path: str) -> None:
    folder = make(tmp_path / "모델", path)
    if path.startswith("MAR-INF"):
        (folder / "s.py").touch()
    loadable = (
        find_script(folder, environment={}) is not None
        or files.is_symbol(str(folder))
        or files.is_graph(str(folder))
        or is_text_model(folder)
    )
    assert is_model([path], environment={}) == loadable == (path in MODELS)


@pytest.mark.parametrize(
    ("handler", "environment"),
    [
        ("service:handle", {}),
        ("service.py", {}),
        ("src/service.py:Class", {}),
        (None, {"SAGEMAKER_PROGRAM": "service.py"}),
        (None, {"SAGEMAKER_PROGRAM": "service"}),
        ("service", {"SAGEMAKER_SUBMIT_DIRECTORY": "src"}),
        (None, {"SAGEMAKER_PROGRAM": "service.py", "SAGEMAKER_SUBMIT_DIRECTORY": "file://src"}),
    ],
)
@pytest.mark.parametrize("folder", ["", "code/", "src/", "x/"])
def test_a_script_that_is_named_is_found_where_the_store_sees_it(
    tmp_path: Path, handler: str | None, environment: dict[str, str], folder: str
) -> None:
    path = f"{folder}service.py"
    root = make(tmp_path / "m", path)
    assert not is_model([path], environment={})
    try:
        found = find_script(root, handler, environment) is not None
    except ArtifactError:
        found = False
    assert is_model([path], handler, environment) == found
    in_submitted = "SAGEMAKER_SUBMIT_DIRECTORY" in environment or "src" in (handler or "")
    assert found == (path in ("service.py", "code/service.py") or (in_submitted and "src" in path))


def test_a_folder_with_the_handler_of_the_server_is_a_model() -> None:
    environment = {"SAGEMAKER_HANDLER": "service:handle"}
    assert is_model(["code/service.py"], environment=environment)
    assert is_model(["inference.py"], environment=environment)
    assert not is_model(["service.py"], "other:handle", environment)


def test_a_script_outside_of_the_model_is_none_of_it(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "a.params")
    (tmp_path / "service.py").touch()
    assert find_script(folder, None, {"SAGEMAKER_PROGRAM": "../service.py"}) is None
    assert "../service.py" in script_paths("../service.py", {})


def test_a_model_inside_of_a_model_is_part_of_it() -> None:
    paths = ["시/model/model-symbol.json", "시/model/model-0000.params", "a/b/1/model.onnx", "c/d"]
    assert model_folders(paths) == {"시", "a/b"}


@pytest.mark.parametrize(
    ("names", "adapter", "delta"),
    [
        (["adapter_config.json", "adapter_model.bin"], True, False),
        (["delta.safetensors", "kogpt2.spiece"], False, True),
        (["delta.safetensors", "kogpt2.params"], False, False),
        (["delta.safetensors", "model.safetensors"], False, False),
        ([".delta.safetensors"], False, False),
    ],
)
def test_an_adapter_and_a_delta_have_no_weights_beside_them(
    tmp_path: Path, names: list[str], adapter: bool, delta: bool
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert (is_adapter(tmp_path), is_delta(tmp_path)) == (adapter, delta)
    assert is_model(names, environment={}) == (names[0][0] != ".")
