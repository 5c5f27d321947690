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


class TinyGPT2:
    """A one-layer GPT-2 without biases, as numpy and as a graph of standard operators.

    input_ids, attention_mask (B, T) int64 -> logits (B, T, V) float32
    """

    units, max_length = 16, 32

    def __init__(self, seed: int = 0, vocab: int = 40) -> None:
        self.vocab = vocab
        rng, c = np.random.default_rng(seed), self.units
        shapes = {
            "wte": (self.vocab, c), "wpe": (self.max_length, c), "wq": (c, c), "wk": (c, c),
            "wv": (c, c), "wo": (c, c), "w1": (c, 4 * c), "w2": (4 * c, c), "head": (c, self.vocab),
        }  # fmt: skip
        self.weights: dict[str, Array] = {
            name: rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))
            for name, shape in shapes.items()
        }
        for name in ("wte", "wpe"):
            self.weights[name] *= np.float32(6)  # so that greedy text does not stand still
        self.weights |= {"gamma": np.ones(c, np.float32), "beta": np.zeros(c, np.float32)}

    def logits(self, ids: Array) -> Array:
        """(B, T) -> (B, T, V), all tokens attended to that stand before."""
        w, (_, t) = self.weights, ids.shape
        x = w["wte"][ids] + w["wpe"][:t]
        h = _norm(x)
        scores = (h @ w["wq"]) @ np.swapaxes(h @ w["wk"], 1, 2) / np.sqrt(self.units)
        scores = np.where(np.tril(np.ones((t, t))) > 0, scores, -1e9)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + (p / p.sum(-1, keepdims=True)) @ (h @ w["wv"]) @ w["wo"]
        x = x + np.maximum(_norm(x) @ w["w1"], 0) @ w["w2"]
        logits: Array = _norm(x) @ w["head"]
        return logits

    def save(self, path: Path, **options: Any) -> Path:
        def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
            return helper.make_node(kind, inputs.split(), [output], **attributes)

        constants: dict[str, Array] = {
            "one": np.array(1, np.int64), "zero": np.array(0, np.int64), "last": np.array([-1]),
            "axis0": np.array([0]), "axis1": np.array([1]), "low": np.array(-1e9, np.float32),
            "scale": np.array(self.units**-0.5, np.float32),
        }  # fmt: skip
        norm = {"axis": -1, "epsilon": 1e-5}
        nodes = [
            node("Shape", "input_ids", "bt"),
            node("Gather", "bt one", "t"),
            node("Range", "zero t one", "positions"),
            node("Gather", "wte input_ids", "tokens"),
            node("Gather", "wpe positions", "places"),
            node("Add", "tokens places", "x0"),
            node("LayerNormalization", "x0 gamma beta", "h0", **norm),
            *(node("MatMul", f"h0 w{part}", part) for part in "qkv"),
            node("Transpose", "k", "kt", perm=[0, 2, 1]),
            node("MatMul", "q kt", "raw"),
            node("Mul", "raw scale", "scores"),
            node("Unsqueeze", "positions axis0", "columns"),
            node("Unsqueeze", "positions axis1", "lines"),
            node("LessOrEqual", "columns lines", "before"),
            node("Cast", "attention_mask", "shown", to=TensorProto.BOOL),
            node("Unsqueeze", "shown axis1", "keys"),
            node("And", "before keys", "visible"),
            node("Where", "visible scores low", "masked"),
            node("Softmax", "masked", "p", axis=-1),
            node("MatMul", "p v", "mixed"),
            node("MatMul", "mixed wo", "attention"),
            node("Add", "x0 attention", "x1"),
            node("LayerNormalization", "x1 gamma beta", "h1", **norm),
            node("MatMul", "h1 w1", "wide"),
            node("Relu", "wide", "active"),
            node("MatMul", "active w2", "narrow"),
            node("Add", "x1 narrow", "x2"),
            node("LayerNormalization", "x2 gamma beta", "h2", **norm),
            node("MatMul", "h2 head", "logits"),
        ]
        ids: list[int | str | None] = ["batch", "sequence"]
        return save_graph(
            path,
            nodes,
            [("input_ids", TensorProto.INT64, ids), ("attention_mask", TensorProto.INT64, ids)],
            [("logits", TensorProto.FLOAT, [*ids, self.vocab])],
            {**self.weights, **constants},
            **options,
        )


def _norm(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normed


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
