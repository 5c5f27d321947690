"""GPT-2 as an ONNX graph, made in code from an artifact's weights: one file, read top to bottom.

The graph computes everything between the embedding lookup and the logits; keys and values live in
buffers of the caller's that GroupQueryAttention reads and appends to in place. With `fp16`, for a
GPU, it looks up the embeddings, too: the table is the output projection, which is on the device.

In shapes: B rows, T new tokens, M longest row a buffer has room for, C units, nh heads, hs head
size, V vocabulary.

    input   x          (B, T, C)      token and position embeddings, added; T > 1 only where B = 1
            seqlens_k  (B,) int32     length of each row after this step, less 1
            total      (1,) int32     length of the longest row after this step; never less
            past_i_k, past_i_v        (B, nh, M, hs) of each layer i
    output  logits     (B, V)         after the last of the T tokens
            present_i_k, present_i_v  the same buffers as past_i_k and past_i_v

With `fp16`, instead of `x` and `seqlens_k`:

    input   ids        (B, T) int32   tokens
            positions  (B, T) int32   their places in their rows

fp16 are the weights, the matrix products, keys and values; the sums that run through all layers
and the LayerNorms stay fp32.

Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from common.errors import ArtifactError
from engine.artifacts import artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.tensor_index import Weights
from engine.backends.onnx import int8_kv, packing, quantize

Array = NDArray[Any]
Shapes = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]

MICROSOFT = "com.microsoft"
OURS = "kogpt2"  # `int8/operator.c`
INLINE_BYTES = 128  # smaller tensors are written into the protobuf, as onnxruntime wants it
HEAD_SIZE_MULTIPLE = 8  # GroupQueryAttention's; others are padded with zeros, see `_pad_heads`


def padded_head_size(config: GPT2Config) -> int:
    """The head size of the K/V buffers."""
    return -(-config.head_size // HEAD_SIZE_MULTIPLE) * HEAD_SIZE_MULTIPLE


def kv_names(config: GPT2Config, kind: str) -> Iterator[str]:
    """Names of the K/V inputs (`past`) or outputs (`present`), in the order of their buffers."""
    for i in range(config.num_layers):
        for part in "kv":
            yield f"{kind}_{i}_{part}"


@dataclass(frozen=True)
class Part:
    """Tensors that the protobuf leaves out, to be made together and when they are wanted."""

    shapes: Shapes
    make: Callable[[], dict[str, Array]]
    node: Any = None  # the operator that packs them for itself, with an input x and an output y
    is_matrix: bool = False  # of Int8MatMul's, as it reads it

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes.values())


class GPT2Graph:
    """Builds the graph: the protobuf, and beside it the weights that it leaves out.

    `model` names each tensor of `parts` with a place in a file that does not exist; give them to
    onnxruntime's `SessionOptions.add_external_initializers`. It depends on the model's shape only,
    but for tensors below `INLINE_BYTES`.
    """

    def __init__(self, config: GPT2Config, weights: Weights, precision: str) -> None:
        self.config, self.weights, self.precision = config, weights, precision
        self.parts: list[Part] = []
        self._half = precision == "fp16"
        self.quantized = precision in ("int8", int8_kv.PRECISION)
        self._initializers: dict[str, Any] = {}
        self._nodes: list[Any] = []
        self._last_token = self._tensor("last_token", np.array(-1, dtype=np.int64))
        self.model = self._build()

    @property
    def external(self) -> dict[str, Array]:
        """All tensors of `parts`, made now."""
        made = {name: array for part in self.parts for name, array in part.make().items()}
        return {name: made[name] for part in self.parts for name in part.shapes}

    def _build(self) -> Any:
        c = self.config
        x = self._embed() if self._half else "x"  # (B, T, C)
        for i in range(c.num_layers):
            h = self._norm(x, artifact.ATTENTION_NORM.format(i))
            x = self._attention(h, i, x)
            h = self._norm(x, artifact.FFN_NORM.format(i))
            x = self._feed_forward(h, i, x)
        x = self._op("Gather", [x, self._last_token], axis=1)  # (B, C): the head is the widest part
        x = self._norm(x, artifact.FINAL_NORM)
        head = artifact.EMBEDDING if c.tie_word_embeddings else artifact.OUTPUT
        w = self.weights[head]
        if self._half:
            self._op("Cast", [self._dense(x, w, None, head)], "logits", to=TensorProto.FLOAT)
        else:
            self._dense(x, w, None, head, "logits")
        return self._model()

    def _embed(self) -> str:  # (B, T), (B, T) -> (B, T, C)
        self._op("Gather", ["positions", self._last_token], "seqlens_k", axis=1)  # (B,)
        found = []
        for name, ids in ((artifact.EMBEDDING, "ids"), (artifact.POSITIONS, "positions")):
            table = self._tensor(f"{name}.weight", self.weights[name], np.float16)
            found.append(self._widen(self._op("Gather", [table, ids])))
        return self._op("Add", found)

    def _widen(self, x: str) -> str:
        return self._op("Cast", [x], to=TensorProto.FLOAT) if self._half else x

    def _attention(self, x: str, i: int, residual: str) -> str:  # (B, T, C) -> (B, T, C)
        c, name, out = self.config, artifact.QKV.format(i), artifact.ATTENTION_OUT.format(i)
        w, b = self.weights[name + ".weight"], self.weights[name + ".bias"]
        w_out = self.weights[out + ".weight"]
        if padded_head_size(c) != c.head_size:
            w, b = _pad_heads(w, 3 * c.num_heads, c), _pad_heads(b, 3 * c.num_heads, c)
            w_out = _pad_heads(w_out.T, c.num_heads, c).T
        # onnxruntime's kernels on the CPU have a short way where the scale is 1: q has it already.
        scale = c.attention_scale(i)
        gain, scale = (None, scale) if self._half else (_gain(len(w), scale), 1.0)
        qkv = self._dense(x, w, b, name, gain=gain)  # (B, T, 3C): q, k, v, heads inside each
        y = f"{name}.y"
        inputs = [qkv, "", "", f"past_{i}_k", f"past_{i}_v", "seqlens_k", "total"]
        attributes: dict[str, Any] = {"num_heads": c.num_heads, "kv_num_heads": c.num_heads}
        if self.precision == int8_kv.PRECISION:
            inputs += ["", "", "", "", "", *self._kv_scales(i)]
            attributes |= {"kv_cache_bit_width": 8}
            attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                [y, f"present_{i}_k", f"present_{i}_v"],
                domain=MICROSOFT,
                scale=scale,
                **attributes,
            )
        )
        return self._dense(y, w_out, self.weights[out + ".bias"], out, residual=residual)

    def _kv_scales(self, i: int) -> list[str]:
        """(1, H, 1, hs) each"""
        names = [f"{i}_{part}.scale" for part in "kv"]
        shape = (1, self.config.num_heads, 1, padded_head_size(self.config))
        self._add(
            {name: (shape, np.dtype(np.float32)) for name in names},
            lambda: dict(zip(names, self._all_kv_scales[2 * i : 2 * i + 2], strict=True)),
        )
        return names

    @functools.cached_property
    def _all_kv_scales(self) -> NDArray[np.float32]:
        exact = GPT2Graph(self.config, self.weights, "fp32")
        model = exact.model.SerializeToString()
        return int8_kv.measured(model, exact.external, self.config, self.weights)

    def _feed_forward(self, x: str, i: int, residual: str) -> str:  # (B, T, C) -> (B, T, C)
        hidden, out = artifact.FFN_HIDDEN.format(i), artifact.FFN_OUT.format(i)
        h = self._dense(x, self.weights[hidden + ".weight"], self.weights[hidden + ".bias"], hidden)
        gelu = "FastGelu" if self.config.activation == "gelu_new" else "Gelu"
        h = self._op(gelu, [h], domain=MICROSOFT)
        w, b = self.weights[out + ".weight"], self.weights[out + ".bias"]
        return self._dense(h, w, b, out, residual=residual)

    def _norm(self, x: str, name: str) -> str:
        gamma = self._tensor(name + ".gamma", self.weights[name + ".gamma"])
        beta = self._tensor(name + ".beta", self.weights[name + ".beta"])
        eps = self.config.layer_norm_eps
        y = self._op("LayerNormalization", [x, gamma, beta], axis=-1, epsilon=eps)
        return self._op("Cast", [y], to=TensorProto.FLOAT16) if self._half else y

    def _dense(
        self,
        x: str,
        w: Array,
        b: Array | None,
        name: str,
        output: str = "",
        gain: Array | None = None,
        residual: str = "",
    ) -> str:
        """x W^T + b with W (out, in), b (out,); all of it times `gain` (out,); and `residual`."""
        output = output or f"{name}.out"
        dtype = np.float16 if self._half else np.float32
        b = b if b is None or gain is None else b.astype(np.float32) * gain
        bias = "" if b is None else self._tensor(f"{name}.bias", b, dtype)
        if self.quantized:
            block = quantize.block_size(w.shape[1])
            packed, num_bytes = f"{name}.packed", packing.num_bytes(len(w), w.shape[1], block)
            self._add(
                {packed: ((num_bytes,), np.dtype(np.uint8))},
                lambda: {packed: _packed(w, block, gain)},
                is_matrix=True,
            )
            inputs = [x, packed, bias, residual] if residual else [x, packed, bias]
            attributes = {"N": w.shape[0], "block_size": block}
            return self._op("Int8MatMul", inputs, output, domain=OURS, **attributes)
        kind, weight = "FusedMatMul", f"{name}.weight"
        self._tensor(weight, w, dtype, _alone(kind, [weight], {"transB": 1}), gain)
        product = self._op(kind, [x, weight], "" if bias else output, domain=MICROSOFT, transB=1)
        product = self._op("Add", [product, bias], output) if bias else product
        return self._op("Add", [residual, self._widen(product)]) if residual else product

    def _tensor(
        self,
        name: str,
        value: Array,
        dtype: type[np.floating[Any]] = np.float32,
        node: Any = None,
        gain: Array | None = None,
    ) -> str:
        """An initializer; floats as `dtype`, of the same name once; its rows times `gain`."""
        if name not in self._initializers:
            floats = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
            found: np.dtype[Any] = np.dtype(dtype) if floats else value.dtype
            make = lambda: {name: _as(value, found, name, gain)}  # noqa: E731
            self._add({name: (value.shape, found)}, make, node)
        return name

    def _add(
        self,
        shapes: Shapes,
        make: Callable[[], dict[str, Array]],
        node: Any = None,
        is_matrix: bool = False,
    ) -> None:
        external = {}
        for name, (shape, dtype) in shapes.items():
            tensor = TensorProto(name=name, dims=shape)
            tensor.data_type = helper.np_dtype_to_tensor_dtype(dtype)
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes < INLINE_BYTES and not is_matrix:
                tensor.raw_data = make()[name].tobytes()
            else:
                place_externally(tensor, location="none", offset=0, length=num_bytes)
                external[name] = (shape, dtype)
            self._initializers[name] = tensor
        if external:
            self.parts.append(Part(external, make, node, is_matrix))

    def _op(self, kind: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _model(self) -> Any:
        c, info = self.config, helper.make_tensor_value_info
        F, I32 = TensorProto.FLOAT, TensorProto.INT32
        kv_types = {"fp16": TensorProto.FLOAT16, int8_kv.PRECISION: TensorProto.INT8}
        kv_type = kv_types.get(self.precision, F)
        kv: list[str | int | None] = ["B", c.num_heads, "M", padded_head_size(c)]
        if self._half:
            tokens = [info(name, I32, ["B", "T"]) for name in ("ids", "positions")]
        else:
            tokens = [info("x", F, ["B", "T", c.units]), info("seqlens_k", I32, ["B"])]
        graph = helper.make_graph(
            self._nodes,
            "gpt2",
            [
                *tokens,
                info("total", I32, [1]),
                *(info(name, kv_type, kv) for name in kv_names(c, "past")),
            ],
            [
                info("logits", F, ["B", c.vocab_size]),
                *(info(name, kv_type, kv) for name in kv_names(c, "present")),
            ],
            list(self._initializers.values()),
        )
        return _model_of(graph)


def place_externally(tensor: Any, **entries: Any) -> None:
    """Has an initializer's data lie in a file: `location`, `offset`, `length`."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, entry in entries.items():
        tensor.external_data.add(key=key, value=str(entry))


def only(part: Part, model: Any) -> Any:
    """A graph of a part's operator alone, with its initializers from `model`."""
    info = helper.make_tensor_value_info
    tensors = [t for t in model.graph.initializer if t.name in part.node.input]
    x, y = (info(name, TensorProto.FLOAT, None) for name in "xy")
    return _model_of(helper.make_graph([part.node], "part", [x], [y], tensors))


def _alone(kind: str, weights: list[str], attributes: dict[str, Any]) -> Any:
    return helper.make_node(kind, ["x", *weights], ["y"], domain=MICROSOFT, **attributes)


def _model_of(graph: Any) -> Any:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    if any(node.domain == OURS for node in graph.node):
        opsets.append(helper.make_opsetid(OURS, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _gain(rows: int, scale: float) -> Array:
    """Of q, k and v, the first of which is to be scaled."""
    gain = np.ones((3, rows // 3), np.float32)
    gain[0] = scale
    return gain.reshape(-1)


def _packed(w: Array, block: int, gain: Array | None) -> Array:
    quantized, scales = quantize.quantize(w, block)
    if gain is not None:
        scales.reshape(len(w), -1)[...] *= gain[:, None]
    return np.concatenate([np.asarray(part) for part in packing.packed(quantized, scales)])


def _as(value: Array, dtype: np.dtype[Any], name: str, gain: Array | None = None) -> Array:
    """In this type, whole, and at an address that has it: in a file it may lie at any byte."""
    if value.dtype.name == "bfloat16":
        value = value.astype(np.float32)
    try:
        with np.errstate(over="raise"):
            value = value.astype(dtype, copy=False)
            value = value if gain is None else value * gain[:, None]
    except FloatingPointError:
        raise ArtifactError(
            f"{name} has values beyond {np.finfo(dtype).max:.0f}, which fp16 cannot hold:"
            " use the mxnet backend"
        ) from None
    return np.require(value, requirements=["C", "A"])


def _pad_heads(a: Array, heads: int, config: GPT2Config) -> Array:
    """(heads * hs, ...) -> (heads * padded hs, ...); the zeros add nothing to a product."""
    wide = a.reshape(heads, config.head_size, *a.shape[1:])
    padding = [(0, 0)] * wide.ndim
    padding[1] = (0, padded_head_size(config) - config.head_size)
    padded: Array = np.pad(wide, padding).reshape(-1, *a.shape[1:])
    return padded
