"""The matrix products of a model's step in int8: our operator with each of its kernels that this
processor can run, and onnxruntime's own, on the same weights."""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from benchmarks.worker import Channel
from common import onnx_session
from engine.artifacts.config import GPT2Config
from engine.backends.onnx import graph, packing, quantize

THEIRS = "MatMulNBits"
KERNELS = ("vnni", "avx2", "plain")
ROWS = (1, 8, 64)  # the last as of a prompt, of which the head sees one token
TRIES = 5

Array = NDArray[Any]
Tensors = dict[str, Array]


def ours(name: str, weight: Array, block: int) -> tuple[Any, Tensors]:
    parts = packing.packed(*quantize.quantize(weight, block))
    tensors = {f"{name}.packed": np.concatenate([np.asarray(part) for part in parts])}
    attributes: dict[str, Any] = {"N": len(weight), "block_size": block, "domain": graph.OURS}
    return ("Int8MatMul", attributes), tensors


def theirs(name: str, weight: Array, block: int) -> tuple[Any, Tensors]:
    numbers, scales = quantize.quantize(weight, block)
    attributes: dict[str, Any] = {"N": len(weight), "K": weight.shape[1], "block_size": block}
    attributes |= {"bits": 8, "accuracy_level": 4, "domain": graph.MICROSOFT}
    return (THEIRS, attributes), {f"{name}.q": numbers, f"{name}.scales": scales}


def opened(config: GPT2Config, product: Callable[..., tuple[Any, Tensors]]) -> Any:
    """A session of all products, one after the other, each of its own weights; its inputs `x`,
    `hidden` and `last` are of as many rows as there are."""
    c, hidden = config.units, config.hidden_size
    layer = [("x", 3 * c), ("x", c), ("x", hidden), ("hidden", c)]
    products = [*layer * config.num_layers, ("last", config.vocab_size)]
    widths = {"x": c, "hidden": hidden, "last": c}
    rng = np.random.default_rng(0)
    nodes, initializers = [], []
    weights: Tensors = {}
    for i, (given, columns) in enumerate(products):
        weight = rng.standard_normal((columns, widths[given]), dtype=np.float32)
        block = quantize.block_size(widths[given])
        (kind, attributes), tensors = product(f"w{i}", weight, block)
        nodes.append(helper.make_node(kind, [given, *tensors], [f"y{i}"], **attributes))
        weights |= tensors
    info = helper.make_tensor_value_info
    inputs = [info(name, TensorProto.FLOAT, ["B" + name, wide]) for name, wide in widths.items()]
    outputs = [info(f"y{i}", TensorProto.FLOAT, None) for i in range(len(nodes))]
    for name, array in weights.items():
        tensor = TensorProto(name=name, dims=array.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.place_externally(tensor, location="none", offset=0, length=array.nbytes)
        initializers.append(tensor)
    made = helper.make_graph(nodes, "products", inputs, outputs, initializers)
    versions = {"": 17, graph.MICROSOFT: 1, graph.OURS: 1}
    opsets = [helper.make_opsetid(name, version) for name, version in versions.items()]
    model = helper.make_model(made, opset_imports=opsets, ir_version=9)
    options = onnx_session.session_options()
    options.register_custom_ops_library(str(packing.library()))
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options.add_external_initializers([*weights], values)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def main() -> None:
    config = GPT2Config(**json.loads(sys.argv[1]))
    use = ctypes.CDLL(str(packing.library())).use_kernels
    use.restype, use.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    sessions = {"Int8MatMul": opened(config, ours), THEIRS: opened(config, theirs)}
    there = [kernel for kernel in KERNELS if use(kernel.encode()) is not None]

    def seconds(session: Any, rows: int) -> float:
        rng = np.random.default_rng(rows)
        wide = {"x": config.units, "hidden": config.hidden_size, "last": config.units}
        counts = {"x": rows, "hidden": rows, "last": 1 if rows == max(ROWS) else rows}
        given = {n: rng.standard_normal((counts[n], wide[n]), dtype=np.float32) for n in wide}
        found = []
        for _ in range(TRIES + 1):
            began = time.perf_counter()
            session.run(None, given)
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def measure() -> dict[str, dict[str, float]]:
        """Seconds of all products, by kernel and rows."""
        found = {THEIRS: {str(rows): seconds(sessions[THEIRS], rows) for rows in ROWS}}
        for kernel in there:
            use(kernel.encode())
            rates = {str(rows): seconds(sessions["Int8MatMul"], rows) for rows in ROWS}
            found[f"Int8MatMul, {kernel}"] = rates
        return found

    Channel().serve({"rows": ROWS}, {"measure": measure})


if __name__ == "__main__":
    main()
