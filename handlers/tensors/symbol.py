"""The handler for MXNet symbol checkpoints, as served by the SageMaker MXNet container.

MXNet's Python interface is called by one thread at a time; its own threads compute several requests
in parallel.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.cpus import cpu_count
from common.errors import ArtifactError, InvalidRequest
from common.memory import return_freed_memory
from common.model_files import SYMBOL
from common.mxnet_compat import mx
from engine.artifacts.read_params import read_params
from handlers.model_spec import client_name
from handlers.tensors import symbol_module
from handlers.tensors.admission import check_memory
from handlers.tensors.checkpoint import Shapes, data_shapes, load_symbol, reason
from handlers.tensors.codec import DTYPES, NAMES, Array, TensorSpec
from handlers.tensors.files import PARAMS, SHAPES, symbol_folder
from handlers.tensors.tensor_model import describe, slot, transform_fn
from handlers.tensors.v2 import Metadata

logger = logging.getLogger(__name__)

__all__ = ["IN_ENGINE", "describe", "model_fn", "transform_fn"]  # see `handlers.dispatch.Handler`

IN_ENGINE = False
FOR_SCRIPTS = symbol_module  # users' scripts expect a `mx.mod.Module`
MXNET_BYTES = 200 << 20  # resident memory of the library itself
# Suffix of a training graph's inputs that predictions do not depend on.
LABEL = "label"


def model_fn(model_dir: str, name: str | None = None) -> SymbolModel:
    """Load the graph. Raises `ArtifactError` with the reason in one sentence, or `OutOfMemory`."""
    folder = symbol_folder(model_dir)
    # MXNet holds the weights, and a copy in the layout of the convolutions.
    check_memory(2 * (folder / PARAMS).stat().st_size + MXNET_BYTES)
    model = SymbolModel(folder, client_name(name or Path(model_dir).name))
    return_freed_memory()
    return model


class SymbolModel:
    """A graph and its weights. Computes any number of rows at a time if the graph allows it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._shapes = data_shapes(folder)
        self._symbol = load_symbol(folder, self._shapes)
        self._order, self._outputs = self._symbol.list_inputs(), self._symbol.list_outputs()
        self._labels = [n for n in self._order if n.endswith(LABEL) and n not in self._shapes]
        fed = {*self._shapes, *self._labels}
        weights = read_params(folder / PARAMS)
        needed = [n for n in self._order if n not in fed]
        missing = [n for n in needed if n not in weights]
        if missing:
            raise ArtifactError(f"{PARAMS} lacks {', '.join(missing)[:300]}")
        # MXNet cannot infer the shapes of some operators' weights: they come from the file.
        self._weight_shapes: Shapes = {}
        inferred = self._infer(self._shapes, partial=True)
        for n in needed:
            if inferred[n] and all(inferred[n]) and tuple(weights[n].shape) != inferred[n]:
                raise ArtifactError(
                    f"{n} has shape {list(weights[n].shape)} in {PARAMS}, must be"
                    f" {list(inferred[n])} with the shapes of {SHAPES}"
                )
        arguments = self._symbol.list_arguments()
        self._weight_shapes = {n: tuple(weights[n].shape) for n in needed if n in arguments}
        inferred = self._infer(self._shapes)
        self._batch = next(iter(self._shapes.values()))[0]
        rows = [*self._shapes.values(), *(inferred[n] for n in self._outputs)]
        # If False, the first dimension may be no batch, and requests must have the file's shapes.
        self._batched = all(shape[:1] == (self._batch,) for shape in rows)
        self._dtypes = self._infer_types({n: weights[n].dtype for n in needed})
        self._weights = {n: mx.nd.array(weights[n], dtype=weights[n].dtype) for n in needed}
        mx.nd.waitall()
        self._graph = mx.nd.CachedOp(self._symbol, [("static_alloc", False)])
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(cpu_count())
        self.metadata = Metadata(
            name,
            "mxnet_symbol",
            [self._spec(n, shape) for n, shape in self._shapes.items()],
            [self._spec(n, inferred[n]) for n in self._outputs],
        )
        # Compute once, so that errors of MXNet's operators fail the load.
        zeros = {n: np.zeros(shape, self._dtypes[n]) for n, shape in self._shapes.items()}
        try:
            self.run(zeros, [], threading.TIMEOUT_MAX)
        except InvalidRequest as error:
            raise ArtifactError(error.message) from None

    def _infer_types(self, weights: Mapping[str, Any]) -> dict[str, np.dtype[Any]]:
        """Infer the dtypes of all inputs and outputs, by name, from the weights' dtypes."""
        try:
            # Infer partially: the labels' dtypes remain unknown, and become float32 below.
            arguments, outputs, _ = self._symbol.infer_type_partial(
                **{n: t.type for n, t in weights.items()}
            )
        except mx.MXNetError as error:
            raise ArtifactError(f"{SYMBOL} and {PARAMS} do not fit: {reason(error)}") from None
        names = (*self._symbol.list_arguments(), *self._outputs)
        types = (*(arguments or ()), *(outputs or ()))
        return {n: np.dtype(t or np.float32) for n, t in zip(names, types, strict=True)}

    def _infer(self, shapes: Shapes, *, partial: bool = False) -> Shapes:
        """Infer all shapes, by name; with `partial` unknown sizes are 0. Raises `ArtifactError`."""
        infer = self._symbol.infer_shape_partial if partial else self._symbol.infer_shape
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # MXNet warns of unknown shapes
                arguments, outputs, states = infer(**self._weight_shapes, **shapes)
        except mx.MXNetError as error:
            raise ArtifactError(f"{SYMBOL} cannot compute {shapes}: {reason(error)}") from None
        if arguments is None:
            raise ArtifactError(f"{SHAPES} must name all inputs, is {list(shapes)}")
        names = self._symbol.list_arguments() + self._outputs + self._symbol.list_auxiliary_states()
        return dict(zip(names, arguments + outputs + states, strict=True))

    def _spec(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        dtype = self._dtypes[name]
        if dtype not in NAMES:
            raise ArtifactError(f"{name} is of {dtype}, must be one of {DTYPES}")
        if not self._batched:
            return TensorSpec(name, NAMES[dtype], shape)
        # As in SageMaker's container, a single input is bound to the request's shape: a graph that
        # flattens its input takes images without a channel dimension.
        accepts = self._accepts_rows if [*self._shapes] == [name] else None
        return TensorSpec(name, NAMES[dtype], ("batch", *shape[1:]), accepts)

    def _accepts_rows(self, shape: tuple[int, ...]) -> bool:
        """Return whether a graph of one input computes rows of this shape."""
        (name,) = self._shapes
        row = shape[1:]
        return any(self._accepts(((name, (rows, *row)),)) for rows in (shape[0], self._batch))

    # Answers

    def run(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], timeout_s: float
    ) -> dict[str, Array]:
        end = time.monotonic() + timeout_s
        values = self._compute_rows(inputs, end) if self._batched else self._compute(inputs, end)
        named = dict(zip(self._outputs, values, strict=True))
        return {name: named[name] for name in outputs}

    def _compute_rows(self, inputs: Mapping[str, Array], end: float) -> list[Array]:
        """Compute all rows at once, or in batches of the size that the graph fixes."""
        rows = self._rows(inputs)
        shapes = tuple((n, a.shape) for n, a in inputs.items())
        batch = rows if self._accepts(shapes) else self._batch
        results = []
        for start in range(0, rows, batch):
            part = {n: _padded(a[start : start + batch], batch) for n, a in inputs.items()}
            results.append([a[: rows - start] for a in self._compute(part, end)])
        return [np.concatenate(p) if len(p) > 1 else p[0] for p in zip(*results, strict=True)]

    def _rows(self, inputs: Mapping[str, Array]) -> int:
        counts = {name: len(array) for name, array in inputs.items()}
        rows = min(counts.values())
        if len(set(counts.values())) > 1:
            raise InvalidRequest(f"the inputs have different numbers of rows: {counts}")
        if rows == 0:
            raise InvalidRequest(f"{', '.join(counts)} has no rows, must have at least one")
        return rows

    @functools.lru_cache(maxsize=256)  # noqa: B019 -- a worker has one model for its whole life
    def _accepts(self, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> bool:
        """Return whether the graph computes all rows at once; False if it fixes the batch size."""
        rows = shapes[0][1][0]
        with self._lock:
            try:
                inferred = self._infer(dict(shapes))
            except ArtifactError:
                return False
        return all(inferred[n][:1] == (rows,) for n in self._outputs)

    def _compute(self, inputs: Mapping[str, Array], end: float) -> list[Array]:
        with slot(self._slots, end):
            try:
                with self._lock:
                    values = self._graph(*self._arguments(inputs))
                    values = values if isinstance(values, list) else [values]
                for value in values:
                    value.wait_to_read()
                with self._lock:
                    return [value.asnumpy() for value in values]
            except mx.MXNetError as error:
                logger.warning("the graph failed: %s", error)
                raise InvalidRequest(f"the model cannot compute this: {reason(error)}") from None

    def _arguments(self, inputs: Mapping[str, Array]) -> list[Any]:
        arrays = {n: mx.nd.array(a, dtype=a.dtype) for n, a in inputs.items()}
        if self._labels:
            inferred = self._infer({n: tuple(a.shape) for n, a in inputs.items()})
            arrays |= {n: mx.nd.zeros(inferred[n]) for n in self._labels}
        return [arrays[n] if n in arrays else self._weights[n] for n in self._order]


def _padded(rows: Array, count: int) -> Array:
    """Pad `rows` with zeros to `count` rows."""
    if len(rows) == count:
        return rows
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])
