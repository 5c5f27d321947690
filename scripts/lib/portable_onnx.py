"""GPT-2 as an ONNX graph of standard operators alone, for other servers.

In shapes: B rows, T new tokens, P past tokens, S = P + T, C units, nh heads, hs head size, V
vocabulary.

    input   input_ids       (B, T) int64
            attention_mask  (B, S) int64   0 where a row is padded, on either side
            past_key_values.i.key, .value  (B, nh, P, hs) of each layer i, only with a past
    output  logits          (B, T, V)
            present.i.key, .value          (B, nh, S, hs), only with a past

A token's position is the number of unpadded tokens before it, as in transformers' `generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from engine.artifacts import artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.tensor_index import Weights
from scripts.lib.problem import Problem

OPSET, IR_VERSION = 17, 9  # what runtimes of 2023 read, too
MAX_BYTES = (1 << 31) - (1 << 20)  # of a protobuf
MASKED = float(np.finfo(np.float32).min)


def write_onnx(
    config: GPT2Config,
    weights: Weights,
    path: Path,
    with_past: bool,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """`progress` is called with bytes of weights taken in. Raises `Problem` beyond 2 GiB."""
    if 4 * config.num_parameters > MAX_BYTES:
        raise Problem("the model is larger than the 2 GiB that one .onnx file can hold")
    model = _Graph(config, weights, with_past, progress).build()
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


class _Graph:
    def __init__(
        self,
        config: GPT2Config,
        weights: Weights,
        with_past: bool,
        progress: Callable[[int], object],
    ) -> None:
        self.config, self.weights, self.with_past = config, weights, with_past
        self._progress = progress
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._outputs: list[str] = []

    def build(self) -> Any:
        c = self.config
        table = self._weight(artifact.EMBEDDING)
        positions, mask = self._positions_and_mask()
        x = self._op("Gather", [table, "input_ids"])  # (B, T, C)
        x = self._op("Add", [x, self._op("Gather", [self._weight(artifact.POSITIONS), positions])])
        for i in range(c.num_layers):
            h = self._norm(x, artifact.ATTENTION_NORM.format(i))
            x = self._op("Add", [x, self._attention(h, mask, i)])
            h = self._norm(x, artifact.FFN_NORM.format(i))
            h = self._gelu(self._dense(h, artifact.FFN_HIDDEN.format(i)))
            x = self._op("Add", [x, self._dense(h, artifact.FFN_OUT.format(i))])
        x = self._norm(x, artifact.FINAL_NORM)
        head = table if c.tie_word_embeddings else self._weight(artifact.OUTPUT)
        self._op("MatMul", [x, self._op("Transpose", [head], perm=[1, 0])], "logits")
        return self._model()

    def _positions_and_mask(self) -> tuple[str, str]:
        """Each new token's position (B, T), and what is added to the scores (B, 1, T, S)."""
        zero, one = self._ints([0]), self._ints([1])
        new = self._op("Slice", [self._op("Shape", ["input_ids"]), one, self._ints([2]), zero])
        whole_shape = self._op("Shape", ["attention_mask"])
        whole = self._op("Slice", [whole_shape, one, self._ints([2]), zero])  # [S]
        past = self._op("Sub", [whole, new])  # [P]
        counted = self._op("CumSum", ["attention_mask", self._ints(1)])
        counted = self._op("Max", [self._op("Sub", [counted, one]), zero])  # (B, S)
        positions = self._op("Slice", [counted, past, whole, one])  # (B, T)
        columns = self._op(
            "Range", [self._ints(0), self._op("Squeeze", [whole, zero]), self._ints(1)]
        )
        rows = self._op("Slice", [columns, past, whole, zero])  # (T,): where the queries stand
        earlier = self._op("LessOrEqual", [columns, self._op("Unsqueeze", [rows, one])])  # (T, S)
        kept = self._op("Greater", ["attention_mask", zero])
        kept = self._op("Unsqueeze", [kept, self._ints([1, 2])])  # (B, 1, 1, S)
        seen = self._op("And", [kept, earlier])  # (B, 1, T, S)
        return positions, self._op("Where", [seen, self._float(0.0), self._float(MASKED)])

    def _attention(self, x: str, mask: str, i: int) -> str:  # (B, T, C) -> (B, T, C)
        c = self.config
        qkv = self._dense(x, artifact.QKV.format(i))
        split = [f"q_{i}", f"k_{i}", f"v_{i}"]
        self._nodes.append(helper.make_node("Split", [qkv], split, axis=-1))
        heads = self._ints([0, 0, c.num_heads, c.head_size])
        q, k, v = (
            self._op("Transpose", [self._op("Reshape", [z, heads])], perm=[0, 2, 1, 3])
            for z in split
        )  # (B, nh, T, hs)
        if self.with_past:
            past = f"past_key_values.{i}"
            k = self._op("Concat", [f"{past}.key", k], f"present.{i}.key", axis=2)
            v = self._op("Concat", [f"{past}.value", v], f"present.{i}.value", axis=2)
        scores = self._op("MatMul", [q, self._op("Transpose", [k], perm=[0, 1, 3, 2])])
        scores = self._op("Mul", [scores, self._float(c.attention_scale(i))])  # (B, nh, T, S)
        attention = self._op("Softmax", [self._op("Add", [scores, mask])], axis=-1)
        y = self._op("Transpose", [self._op("MatMul", [attention, v])], perm=[0, 2, 1, 3])
        y = self._op("Reshape", [y, self._ints([0, 0, c.units])])
        return self._dense(y, artifact.ATTENTION_OUT.format(i))

    def _gelu(self, x: str) -> str:
        f = self._float
        half = self._op("Mul", [x, f(0.5)])
        if self.config.activation == "gelu":
            inner = self._op("Erf", [self._op("Mul", [x, f(0.5**0.5)])])
        else:  # 0.7978845608028654 (x + 0.044715 x^3), sqrt(2 / pi) in front
            cube = self._op("Mul", [self._op("Mul", [x, x]), x])
            inner = self._op("Add", [x, self._op("Mul", [cube, f(0.044715)])])
            inner = self._op("Tanh", [self._op("Mul", [inner, f(0.7978845608028654)])])
        return self._op("Mul", [half, self._op("Add", [inner, f(1.0)])])

    def _norm(self, x: str, name: str) -> str:
        gamma, beta = self._weight(f"{name}.gamma"), self._weight(f"{name}.beta")
        eps = self.config.layer_norm_eps
        return self._op("LayerNormalization", [x, gamma, beta], axis=-1, epsilon=eps)

    def _dense(self, x: str, name: str) -> str:
        """x W + b with W written [in, out], as MatMul takes it."""
        product = self._op("MatMul", [x, self._weight(f"{name}.weight", transposed=True)])
        return self._op("Add", [product, self._weight(f"{name}.bias")])

    def _weight(self, name: str, transposed: bool = False) -> str:
        if name not in self._initializers:
            w = self.weights[name]
            w = np.ascontiguousarray(w.T if transposed else w, dtype=np.float32)
            self._initializers[name] = numpy_helper.from_array(w, name)
            self._progress(self.weights[name].nbytes)
        return name

    def _ints(self, value: int | list[int]) -> str:
        return self._constant(np.array(value, dtype=np.int64))

    def _float(self, value: float) -> str:
        return self._constant(np.array(value, dtype=np.float32))

    def _constant(self, value: NDArray[Any]) -> str:
        name = f"constant_{value.dtype}_{value.tolist()}"
        self._initializers.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def _op(self, kind: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _model(self) -> Any:
        c, info = self.config, helper.make_tensor_value_info
        F, I64 = TensorProto.FLOAT, TensorProto.INT64
        inputs = [
            info("input_ids", I64, ["batch", "sequence"]),
            info("attention_mask", I64, ["batch", "total" if self.with_past else "sequence"]),
        ]
        outputs = [info("logits", F, ["batch", "sequence", c.vocab_size])]
        for i in range(c.num_layers if self.with_past else 0):
            for kind in ("key", "value"):
                past: list[str | int | None] = ["batch", c.num_heads, "past", c.head_size]
                inputs.append(info(f"past_key_values.{i}.{kind}", F, past))
                present: list[str | int | None] = ["batch", c.num_heads, "total", c.head_size]
                outputs.append(info(f"present.{i}.{kind}", F, present))
        values = list(self._initializers.values())
        graph = helper.make_graph(self._nodes, "gpt2", inputs, outputs, values)
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
