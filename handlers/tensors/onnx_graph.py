"""The handler for ONNX graphs: tensors in, tensors out.

The graph is `model.onnx`, `1/model.onnx` (the highest version is served), or, as in Triton's
repositories and SageMaker's multi-model archives, `name/1/model.onnx`. Its weights may be in files
beside it. Only onnxruntime's own operators run: libraries of custom operators are never loaded.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.cpus import cpu_count
from common.errors import ArtifactError, DeadlineExceeded, EngineError, InvalidRequest
from common.memory import return_freed_memory
from handlers.model_spec import client_name
from handlers.tensors.admission import check_memory
from handlers.tensors.codec import Array, TensorSpec, listed
from handlers.tensors.files import find_graph
from handlers.tensors.tensor_model import describe, slot, transform_fn
from handlers.tensors.v2 import Metadata

logger = logging.getLogger(__name__)

__all__ = ["IN_ENGINE", "describe", "model_fn", "transform_fn"]  # see `handlers.dispatch.Handler`

IN_ENGINE = False
# Peak resident bytes of a load, as factors of the graph's own size (file and parsed graph) and of
# the weights beside it (a copy packed for the processor), and of the library. Larger values refuse
# models that would fit; with smaller ones the kernel may kill the worker.
GRAPH_FACTOR, WEIGHTS_FACTOR = 2.0, 1.2
LIBRARY_BYTES = 64 << 20

DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16",
    "float": "FP32", "double": "FP64", "string": "BYTES",
}  # fmt: skip


def model_fn(model_dir: str, name: str | None = None) -> OnnxModel:
    """Load the graph. Raises `ArtifactError` with the reason in one sentence, or `OutOfMemory`."""
    path, version = find_graph(model_dir)
    graph_bytes = path.stat().st_size
    total_bytes = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
    needed = GRAPH_FACTOR * graph_bytes + LIBRARY_BYTES
    needed += WEIGHTS_FACTOR * (total_bytes - graph_bytes)
    check_memory(int(needed))
    model = OnnxModel(path, client_name(name or Path(model_dir).name), version)
    return_freed_memory()  # the load has read the file into memory
    return model


class OnnxModel:
    """An onnxruntime session. Thread-safe."""

    def __init__(self, path: Path, name: str, version: str) -> None:
        from common import onnx_session

        self._runtime = onnx_session
        try:
            self._session = onnx_session.open_graph(path)
        except EngineError:
            raise
        except Exception as error:
            raise ArtifactError(f"{path.name} cannot be loaded: {_reason(error)}") from None
        self.metadata = Metadata(
            name,
            "onnxruntime_onnx",
            [_spec(value) for value in self._session.get_inputs()],
            [_spec(o) for o in self._session.get_outputs() if _datatype(o)],
            version,
            {o.name: o.type for o in self._session.get_outputs() if not _datatype(o)},
        )
        if not self.metadata.outputs:
            raise ArtifactError(
                f"{path.name} has no output that is a tensor, but {self.metadata.unserved}"
            )
        # More concurrent runs take more memory and no less time.
        self._slots = threading.BoundedSemaphore(max(2, cpu_count()))

    def run(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], timeout_s: float
    ) -> dict[str, Array]:
        end = time.monotonic() + timeout_s
        options = self._runtime.run_options()
        try:
            with (
                slot(self._slots, end),
                _cancelled_after(end - time.monotonic(), options),
                self._runtime.out_of_memory("the answer"),
            ):
                values = self._session.run(list(outputs), dict(inputs), options)
        except EngineError:
            raise
        except Exception as error:
            logger.warning("the graph failed: %s", error)
            if options.terminate:
                raise DeadlineExceeded(f"no answer within {timeout_s:g} s") from None
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            raise InvalidRequest(
                f"the model cannot compute with {shapes}: {_reason(error)}; it takes"
                f" {listed(self.metadata.inputs)}"
            ) from None
        return dict(zip(outputs, values, strict=True))


@contextlib.contextmanager
def _cancelled_after(timeout_s: float, options: Any) -> Iterator[None]:
    """Cancel the run in the block, which must use `options`, after `timeout_s`."""
    timer = threading.Timer(timeout_s, setattr, (options, "terminate", True))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # if no thread can start, the run is not cancelled
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _datatype(value: Any) -> str | None:
    """Return the datatype of a `NodeArg`, such as FP32 for `tensor(float)`; None if unknown."""
    kind: str = value.type
    return DATATYPES.get(kind.removeprefix("tensor(").removesuffix(")"))


def _spec(value: Any) -> TensorSpec:
    datatype = _datatype(value)
    if datatype is None:
        raise ArtifactError(
            f"input {value.name} is {value.type}, but only tensors of"
            f" {', '.join(DATATYPES)} can be sent"
        )
    return TensorSpec(value.name, datatype, tuple(value.shape))


def _reason(error: Exception) -> str:
    """Shorten onnxruntime's error message to one line, without source locations and our paths."""
    text = str(error).split(" : ", 3)[-1].split("Status Message: ")[-1]
    text = re.sub(r"/onnxruntime_src/\S+ [^)]*\) |Load model from .*? failed: ?", "", text)
    return " ".join(text.split())[:300].rstrip(".")
