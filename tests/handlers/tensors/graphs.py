"""Small ONNX graphs and MXNet symbol checkpoints with random weights, for tests."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
Value = tuple[str, int, list[int | str | None]]


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def save_graph(
    path: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: dict[str, Array] | None = None,
    **options: Any,
) -> Path:
    """Writes a graph of standard operators; values are (name, type, shape)."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path), **options)
    return path


def identity(path: Path, datatype: int, shape: list[int | str | None]) -> Path:
    """y = x"""
    node = helper.make_node("Identity", ["x"], ["y"])
    return save_graph(path, [node], [("x", datatype, shape)], [("y", datatype, shape)])


class TinyLM:
    """A causal language model of random weights, as numpy and as a graph of standard operators.

    input_ids, attention_mask (B, T) int64 -> logits (B, T, V) float32
    """

    def __init__(self, seed: int = 0, vocab: int = 40) -> None:
        rng, self.vocab = np.random.default_rng(seed), vocab
        self.tokens = rng.standard_normal((vocab, 16)).astype(np.float32)
        self.head = rng.standard_normal((16, vocab)).astype(np.float32)

    def logits(self, ids: Array) -> Array:
        """(B, T) -> (B, T, V), of all tokens up to each."""
        logits: Array = np.sin(np.cumsum(self.tokens[ids], axis=1)) @ self.head
        return logits

    def save(self, path: Path, **options: Any) -> Path:
        nodes = [
            helper.make_node("Gather", ["tokens", "input_ids"], ["embedded"]),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
            helper.make_node("Mul", ["embedded", "column"], ["visible"]),
            helper.make_node("CumSum", ["visible", "one"], ["sums"]),
            helper.make_node("Sin", ["sums"], ["hidden"]),
            helper.make_node("MatMul", ["hidden", "head"], ["logits"]),
        ]
        weights = {"tokens": self.tokens, "head": self.head}
        constants = {"last": np.array([-1]), "one": np.array(1)}
        ids: list[int | str | None] = ["batch", "sequence"]
        return save_graph(
            path,
            nodes,
            [("input_ids", TensorProto.INT64, ids), ("attention_mask", TensorProto.INT64, ids)],
            [("logits", TensorProto.FLOAT, [*ids, self.vocab])],
            weights | constants,
            **options,
        )


def classifier(folder: Path, seed: int = 0, *, size: int = 16, classes: int = 5) -> Any:
    """An image classifier as `Module.save_checkpoint` and SageMaker leave it; returns a function
    that computes it by a direct bind: images (n, 3, size, size) -> probabilities (n, classes)."""
    from common.mxnet_compat import mx

    x = mx.sym.Variable("data")
    for i, filters in enumerate((4, 8)):
        x = mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=filters, name=f"conv{i}")
        x = mx.sym.BatchNorm(x, fix_gamma=False, name=f"bn{i}")
        x = mx.sym.Activation(x, act_type="relu")
        x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x), num_hidden=classes, name="fc")
    symbol = mx.sym.SoftmaxOutput(x, name="softmax")
    return save_checkpoint(folder, symbol, {"data": (1, 3, size, size)}, seed)


def save_checkpoint(
    folder: Path, symbol: Any, shapes: dict[str, tuple[int, ...]], seed: int = 0
) -> Any:
    """Random weights for `symbol`; returns a function that computes it by a direct bind."""
    from common.mxnet_compat import mx

    rng = np.random.default_rng(seed)
    arguments, _, states = symbol.infer_shape(**shapes)
    sizes = dict(zip(symbol.list_arguments(), arguments, strict=True))
    sizes = {n: s for n, s in sizes.items() if n not in shapes and not n.endswith("label")}
    args = {n: mx.nd.array(rng.standard_normal(s) / np.sqrt(s[-1])) for n, s in sizes.items()}
    aux = {
        n: mx.nd.array(rng.random(s) + 0.5)  # of BatchNorm: variances must be positive
        for n, s in zip(symbol.list_auxiliary_states(), states, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.model.save_checkpoint(str(folder / "model"), 0, symbol, args, aux)
    rows = [{"shape": list(shape), "name": name} for name, shape in shapes.items()]
    (folder / "model-shapes.json").write_text(json.dumps(rows), encoding="utf-8")

    def bound(**inputs: Array) -> list[Array]:
        given = {n: a.shape for n, a in inputs.items()}
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", **given)
        executor.copy_params_from(args, aux, allow_extra_params=True)
        feed = {n: mx.nd.array(a) for n, a in inputs.items()}
        return [a.asnumpy() for a in executor.forward(is_train=False, **feed)]

    return bound
