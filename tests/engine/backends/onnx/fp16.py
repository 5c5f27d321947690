"""The fp16 graph in numpy, with a rounding to fp16 wherever a GPU makes one.

onnxruntime's CPU leaves some of them out, so this says what the GPU's arithmetic will cost.
In shapes: T tokens of one text, C units, nh heads, hs head size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.artifacts import artifact as artifacts
from engine.artifacts.artifact import Artifact

Floats = NDArray[np.float32]
erf = np.vectorize(math.erf, otypes=[np.float32])


def rounded(x: NDArray[Any]) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def logits(artifact: Artifact, ids: list[int]) -> Floats:
    """Logits (T, V) after each of `ids`; of a model with erf's GELU."""
    c = artifact.config
    assert c.activation == "gelu"
    w = {name: rounded(np.asarray(value)) for name, value in artifact.weights.items()}
    norms = {n: np.asarray(v, np.float32) for n, v in artifact.weights.items() if "_ln" in n}
    T = len(ids)
    hidden = np.triu(np.full((T, T), -np.inf, np.float32), 1)

    def norm(x: Floats, name: str) -> Floats:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + c.layer_norm_eps)
        return rounded(x * norms[name + ".gamma"] + norms[name + ".beta"])

    def dense(x: Floats, name: str) -> Floats:
        return rounded(rounded(x @ w[name + ".weight"].T) + w[name + ".bias"])

    x = w[artifacts.EMBEDDING][ids] + w[artifacts.POSITIONS][:T]  # (T, C), fp32 as all its sums
    for i in range(c.num_layers):
        qkv = dense(norm(x, artifacts.ATTENTION_NORM.format(i)), artifacts.QKV.format(i))
        q, k, v = qkv.reshape(T, 3, c.num_heads, c.head_size).transpose(1, 2, 0, 3)  # (nh, T, hs)
        scores = q @ k.transpose(0, 2, 1) * c.attention_scale(i) + hidden
        p = rounded(np.exp(scores - scores.max(-1, keepdims=True)))
        y = rounded(p @ v / p.sum(-1, keepdims=True)).transpose(1, 0, 2).reshape(T, -1)
        x = x + dense(y, artifacts.ATTENTION_OUT.format(i))
        h = dense(norm(x, artifacts.FFN_NORM.format(i)), artifacts.FFN_HIDDEN.format(i))
        h = rounded(0.5 * h * (1 + erf(h / math.sqrt(2))))
        x = x + dense(h, artifacts.FFN_OUT.format(i))
    return rounded(norm(x, artifacts.FINAL_NORM) @ w[artifacts.EMBEDDING].T)
