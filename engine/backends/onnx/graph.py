"""GPT-2 as an ONNX graph for a GPU, made from an artifact's weights: one file, read top to bottom.

Keys and values are in buffers of the caller, which GroupQueryAttention reads and appends to in
place. Weights, matrix products, keys and values are fp16; the residual sums and the LayerNorms are
fp32. A tied output projection is the embedding, which is on the device once.

In shapes: B rows, T new tokens, M longest row a buffer has space for, C units, nh heads, hs head
size, V vocabulary.

    input   ids        (B, T) int32   tokens; T > 1 only where B = 1
            positions  (B, T) int32   their places in their rows
            total      (1,) int32     length of the longest row after this step; never less
            past_i_k, past_i_v        (B, nh, M, hs) of each layer i
    output  logits     (B, V)         after the last of the T tokens
            present_i_k, present_i_v  the same buffers as past_i_k and past_i_v

Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from common.errors import ArtifactError
from engine.artifacts import artifact
from engine.artifacts.config import GPT2Config
from engine.artifacts.tensor_index import Weights

Array = NDArray[Any]

MICROSOFT = "com.microsoft"
INLINE_BYTES = 128  # smaller tensors are written into the protobuf, as onnxruntime wants it
HEAD_SIZE_MULTIPLE = 8  # GroupQueryAttention's; others are padded with zeros, see `_pad_heads`


def padded_head_size(config: GPT2Config) -> int:
    """Return the head size of the K/V buffers: the model's, rounded up."""
    return -(-config.head_size // HEAD_SIZE_MULTIPLE) * HEAD_SIZE_MULTIPLE


def kv_names(config: GPT2Config, kind: str) -> Iterator[str]:
    """Names of the K/V inputs (`past`) or outputs (`present`), in the order of their buffers."""
    for i in range(config.num_layers):
        for part in "kv":
            yield f"{kind}_{i}_{part}"


class GPT2Graph:
    """Builds the graph: the protobuf, and the weights outside of it.

    `model` refers to the `external` tensors by name and a file that does not exist; pass them to
    onnxruntime's `SessionOptions.add_external_initializers`. Except for tensors below
    `INLINE_BYTES`, the protobuf depends on the model's shape only.
    """

    def __init__(self, config: GPT2Config, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.weight_bytes = 0  # outside of the protobuf
        self._makers: dict[str, Callable[[], Array]] = {}
        self._initializers: dict[str, Any] = {}
        self._nodes: list[Any] = []
        self._last_token = self._tensor("last_token", np.array(-1, dtype=np.int64))
        self.model = self._build()

    @property
    def external(self) -> dict[str, Array]:
        """The tensors outside of the protobuf, by name; converted at each access."""
        return {name: make() for name, make in self._makers.items()}

    def _build(self) -> Any:
        c = self.config
        x = self._embed()  # (B, T, C)
        for i in range(c.num_layers):
            h = self._norm(x, artifact.ATTENTION_NORM.format(i))
            x = self._attention(h, i, x)
            h = self._norm(x, artifact.FFN_NORM.format(i))
            x = self._feed_forward(h, i, x)
        x = self._op("Gather", [x, self._last_token], axis=1)  # (B, C): the head is the widest part
        x = self._norm(x, artifact.FINAL_NORM)
        head = artifact.EMBEDDING if c.tie_word_embeddings else artifact.OUTPUT
        logits = self._dense(x, self.weights[head], None, head)
        self._op("Cast", [logits], "logits", to=TensorProto.FLOAT)
        return self._model()

    def _embed(self) -> str:  # (B, T), (B, T) -> (B, T, C)
        self._op("Gather", ["positions", self._last_token], "seqlens_k", axis=1)  # (B,)
        embeddings = []
        for name, ids in ((artifact.EMBEDDING, "ids"), (artifact.POSITIONS, "positions")):
            table = self._tensor(f"{name}.weight", self.weights[name], np.float16)
            embeddings.append(self._widen(self._op("Gather", [table, ids])))
        return self._op("Add", embeddings)

    def _widen(self, x: str) -> str:
        return self._op("Cast", [x], to=TensorProto.FLOAT)

    def _attention(self, x: str, i: int, residual: str) -> str:  # (B, T, C) -> (B, T, C)
        c, name, out = self.config, artifact.QKV.format(i), artifact.ATTENTION_OUT.format(i)
        w, b = self.weights[name + ".weight"], self.weights[name + ".bias"]
        w_out = self.weights[out + ".weight"]
        if padded_head_size(c) != c.head_size:
            w, b = _pad_heads(w, 3 * c.num_heads, c), _pad_heads(b, 3 * c.num_heads, c)
            w_out = _pad_heads(w_out.T, c.num_heads, c).T
        qkv = self._dense(x, w, b, name)  # (B, T, 3C): q, k, v, heads inside each
        y = f"{name}.y"
        inputs = [qkv, "", "", f"past_{i}_k", f"past_{i}_v", "seqlens_k", "total"]
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                [y, f"present_{i}_k", f"present_{i}_v"],
                domain=MICROSOFT,
                scale=c.attention_scale(i),
                num_heads=c.num_heads,
                kv_num_heads=c.num_heads,
            )
        )
        return self._dense(y, w_out, self.weights[out + ".bias"], out, residual=residual)

    def _feed_forward(self, x: str, i: int, residual: str) -> str:  # (B, T, C) -> (B, T, C)
        hidden, out = artifact.FFN_HIDDEN.format(i), artifact.FFN_OUT.format(i)
        h = self._product(x, hidden)
        gelu = "FastGelu" if self.config.activation == "gelu_new" else "Gelu"
        h = self._op(gelu, [h], domain=MICROSOFT)
        return self._product(h, out, residual)

    def _norm(self, x: str, name: str) -> str:
        gamma = self._tensor(name + ".gamma", self.weights[name + ".gamma"])
        beta = self._tensor(name + ".beta", self.weights[name + ".beta"])
        eps = self.config.layer_norm_eps
        y = self._op("LayerNormalization", [x, gamma, beta], axis=-1, epsilon=eps)
        return self._op("Cast", [y], to=TensorProto.FLOAT16)

    def _product(self, x: str, name: str, residual: str = "") -> str:
        w, b = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return self._dense(x, w, b, name, residual)

    def _dense(self, x: str, w: Array, b: Array | None, name: str, residual: str = "") -> str:
        """Add x W^T + b + residual, with W (out, in) and b (out,); return the output's name."""
        weight = self._tensor(f"{name}.weight", w, np.float16)
        product = self._op("FusedMatMul", [x, weight], domain=MICROSOFT, transB=1)
        if b is not None:
            product = self._op("Add", [product, self._tensor(f"{name}.bias", b, np.float16)])
        return self._op("Add", [residual, self._widen(product)]) if residual else product

    def _tensor(self, name: str, value: Array, dtype: type[np.floating[Any]] = np.float32) -> str:
        """Add an initializer, floats as `dtype`, once for each name; return the name."""
        if name not in self._initializers:
            floats = value.dtype.kind == "f" or value.dtype.name == "bfloat16"
            wanted: np.dtype[Any] = np.dtype(dtype) if floats else value.dtype
            tensor = TensorProto(name=name, dims=value.shape)
            tensor.data_type = helper.np_dtype_to_tensor_dtype(wanted)
            num_bytes = math.prod(value.shape) * wanted.itemsize
            if num_bytes < INLINE_BYTES:
                tensor.raw_data = _as(value, wanted, name).tobytes()
            else:
                tensor.data_location = TensorProto.EXTERNAL
                for key, entry in (("location", "none"), ("offset", "0"), ("length", num_bytes)):
                    tensor.external_data.add(key=key, value=str(entry))
                self.weight_bytes += num_bytes
                self._makers[name] = lambda: _as(value, wanted, name)
            self._initializers[name] = tensor
        return name

    def _op(self, kind: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _model(self) -> Any:
        c, info = self.config, helper.make_tensor_value_info
        F, F16, I32 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32
        kv: list[str | int | None] = ["B", c.num_heads, "M", padded_head_size(c)]
        graph = helper.make_graph(
            self._nodes,
            "gpt2",
            [
                *(info(name, I32, ["B", "T"]) for name in ("ids", "positions")),
                info("total", I32, [1]),
                *(info(name, F16, kv) for name in kv_names(c, "past")),
            ],
            [
                info("logits", F, ["B", c.vocab_size]),
                *(info(name, F16, kv) for name in kv_names(c, "present")),
            ],
            list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _as(value: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Convert an array to `dtype`, contiguous and aligned, which mapped files may not be."""
    if value.dtype.name == "bfloat16":
        value = value.astype(np.float32)
    try:
        with np.errstate(over="raise"):
            value = value.astype(dtype, copy=False)
    except FloatingPointError:
        raise ArtifactError(
            f"{name} has values beyond {np.finfo(dtype).max:.0f}, which fp16 cannot hold:"
            " use the mxnet backend"
        ) from None
    return np.require(value, requirements=["C", "A"])


def _pad_heads(a: Array, heads: int, config: GPT2Config) -> Array:
    """Pad each head with zeros: (heads * hs, ...) -> (heads * padded hs, ...)."""
    wide = a.reshape(heads, config.head_size, *a.shape[1:])
    padding = [(0, 0)] * wide.ndim
    padding[1] = (0, padded_head_size(config) - config.head_size)
    padded: Array = np.pad(wide, padding).reshape(-1, *a.shape[1:])
    return padded
