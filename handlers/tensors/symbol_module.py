"""The SageMaker MXNet container's default functions for scripts with a `mx.mod.Module`.

`model_fn` loads a symbol checkpoint as a module. Unlike in that container, errors of a request
explain what would be right, and NPY is never unpickled.

https://github.com/aws/sagemaker-mxnet-inference-toolkit, default_inference_handler.py
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from common.errors import ArtifactError, InvalidRequest
from common.media_types import accepted, media_type
from common.mxnet_compat import mx
from handlers.tensors import codec
from handlers.tensors.checkpoint import data_shapes, load_symbol, reason
from handlers.tensors.codec import NAMES, TensorSpec
from handlers.tensors.files import PARAMS, symbol_folder
from handlers.user_code.conventions import formats

os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")  # else MXNet prints a line for each bind

IN_ENGINE = False


def model_fn(model_dir: str, name: str | None = None) -> Any:
    """Load a `mx.mod.Module` bound for prediction. Raises `ArtifactError`.

    It is bound to one row, as in SageMaker's container, or to the batch size in `model-shapes.json`
    if the graph fixes it.
    """
    folder = symbol_folder(model_dir)
    shapes = data_shapes(folder)
    symbol = load_symbol(folder, shapes)
    try:
        saved = mx.nd.load(str(folder / PARAMS))
        parts: dict[str, dict[str, Any]] = {"arg": {}, "aux": {}}
        for key, array in saved.items():
            kind, _, name = key.partition(":")
            parts[kind][name] = array
    except (mx.MXNetError, KeyError, AttributeError):
        raise ArtifactError(f"{PARAMS} does not hold the arrays of a checkpoint") from None
    one_row = {name: (1, *shape[1:]) for name, shape in shapes.items()}
    with contextlib.suppress(mx.MXNetError):
        _, outputs, _ = symbol.infer_shape(**one_row)
        if outputs and all(shape[:1] == (1,) for shape in outputs):
            return _bound(symbol, one_row, parts)
    try:
        return _bound(symbol, shapes, parts)
    except mx.MXNetError as error:
        raise ArtifactError(f"the model cannot compute {shapes}: {reason(error)}") from None


def _bound(symbol: Any, shapes: dict[str, tuple[int, ...]], parts: dict[str, Any]) -> Any:
    module = mx.mod.Module(symbol, data_names=list(shapes), label_names=None, context=mx.cpu())
    module.bind(data_shapes=list(shapes.items()), for_training=False)
    module.set_params(parts["arg"], parts["aux"], allow_missing=True)
    return module


def input_fn(body: bytes | str, content_type: str | None, model: Any) -> Any:
    """Decode JSON, CSV or NPY as input of `Module.predict`. Raises `InvalidRequest`."""
    name, shape = _only_input(model)
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    kind, _ = media_type(content_type)
    spec = TensorSpec(name, "FP32", ("batch", *shape[1:]), functools.partial(_accepts, model))
    return _batches(mx.nd.array(codec.decode(raw, kind, spec)), model)


def predict_fn(data: Any, model: Any, timeout_s: float) -> Any:
    """Compute the module's outputs for an iterator, an NDArray or a numpy array of rows."""
    if not isinstance(data, mx.io.DataIter):
        data = _batches(data if isinstance(data, mx.nd.NDArray) else mx.nd.array(data), model)
    bound = model.data_shapes
    try:
        with computing():
            return model.predict(data)
    finally:
        if model.data_shapes != bound:  # `predict` has bound it to this request's shape
            model.reshape(bound)


def _accepts(model: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the module computes rows of this shape."""
    name, (rows, *_) = _only_input(model)
    weights = {n: array.shape for n, array in model.get_params()[0].items()}
    try:
        model.symbol.infer_shape(**weights, **{name: (rows, *shape[1:])})
    except mx.MXNetError:
        return False
    return True


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Wait for the computations begun in the block. Raises `InvalidRequest` for MXNet's errors."""
    try:
        yield
        mx.nd.waitall()
    except mx.MXNetError as error:
        raise InvalidRequest(f"the model cannot compute this: {reason(error)}") from None


def output_fn(prediction: Any, accept: str) -> tuple[Any, str]:
    """Encode a prediction as body and content type. Raises `NotAcceptable`, `ScriptError`."""
    arrays = prediction if isinstance(prediction, list | tuple) else [prediction]
    if not arrays or not all(isinstance(array, mx.nd.NDArray) for array in arrays):
        return formats.output_fn(prediction, accept)  # from the script's own predict_fn
    kind = accepted(accept, codec.MEDIA_TYPES)
    outputs = {f"output{i}": array.asnumpy() for i, array in enumerate(arrays)}
    for name, array in outputs.items():
        if array.dtype not in NAMES:
            raise TypeError(f"{name} is of {array.dtype}, must be one of {codec.DTYPES}")
    return codec.encode(outputs, kind), kind


def _only_input(model: Any) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape of the module's only input. Raises `ArtifactError` for others."""
    if len(model.data_shapes) != 1:
        names = ", ".join(shape.name for shape in model.data_shapes)
        raise ArtifactError(f"the model takes {names}: its script must define input_fn")
    name, shape = model.data_shapes[0][:2]
    return name, tuple(shape)


def _batches(rows: Any, model: Any) -> Any:
    """Split rows into an iterator of batches of the module's size, the last padded with zeros."""
    size = _only_input(model)[1][0]
    padding = max(0, size - rows.shape[0])
    if padding:
        rows = mx.nd.concat(rows, mx.nd.zeros((padding, *rows.shape[1:])), dim=0)
    batches = mx.io.NDArrayIter(rows, batch_size=size, last_batch_handle="pad")
    if padding:  # `predict` omits these rows
        batches.getpad = lambda: padding
    return batches
