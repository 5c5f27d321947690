"""Which handler serves a folder: a script, the built-in text model, a graph or a symbol."""

from __future__ import annotations

from pathlib import Path

import pytest

from handlers.dispatch import handler_for
from handlers.user_code.entry_point import Script

SYMBOL = ["model-symbol.json", "model-0000.params", "model-shapes.json"]


@pytest.mark.parametrize(
    ("names", "handler"),
    [
        (["code/inference.py", "model.onnx", "kogpt2.params", "kogpt2.spiece"], "inference.py"),
        (["inference.py", *SYMBOL], "inference.py"),
        (["kogpt2.params", "kogpt2.spiece", "model.onnx"], "text_model"),
        (["model.safetensors", "tokenizer.json", "config.json", "model.onnx"], "text_model"),
        (["kogpt2.spiece", *SYMBOL], "text_model"),
        (["adapter_model.safetensors", "adapter_config.json"], "text_model"),
        (["model.onnx"], "onnx_graph"),
        (["1/model.onnx", "config.pbtxt"], "onnx_graph"),
        (SYMBOL, "symbol"),
        ([*SYMBOL, "model.onnx"], "symbol"),
    ],
)
def test_a_script_comes_first_then_texts_then_tensors(
    tmp_path: Path, names: list[str], handler: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def transform_fn(*_): ..." if name.endswith(".py") else "")
    found = handler_for(str(tmp_path))
    file = found.file if isinstance(found, Script) else found.__name__.rpartition(".")[2]
    assert Path(file).name == handler
