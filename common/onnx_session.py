"""Opens onnxruntime sessions that share one thread pool."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from common.cpus import cpu_count
from common.errors import OutOfMemory
from common.memory import is_out_of_memory

VERSION: str = onnxruntime.__version__
FATAL_ONLY = 4  # a log level: what goes wrong is raised

# Long rows are faster without: a step of eight of 900 tokens takes a quarter less processor time,
# short ones the same. Read when a session is opened.
os.environ.setdefault("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")

_sharing = threading.Lock()


@functools.cache
def _share_threads() -> None:
    """One pool for all sessions: the idle pools of other sessions would spin and take the cores."""
    onnxruntime.set_global_thread_pool_sizes(cpu_count(), 1)


def session_options() -> Any:
    """Those of every session: threads shared, and no arena of its own on the CPU."""
    with _sharing:  # two first loads at once: the pool cannot be sized once one has a session
        _share_threads()
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = FATAL_ONLY
    # An arena keeps the most a long prefill ever took; without one, a step takes as long.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Between steps the cores are for sampling and for other processes. Steps take no longer.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def open_packed(
    path: Path, given: dict[str, Any], library: Path | None = None, profile: Path | None = None
) -> Any:
    """Opens a graph on what `pack` wrote; its weights stay mapped from their files, and those that
    are `given`, OrtValues which the caller keeps, where they are. `library` has operators beside
    onnxruntime's own.

    With `profile`, onnxruntime writes each operator's times to a file whose name begins so
    (`end_profiling` returns it).
    """
    options = session_options()
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library is not None:
        options.register_custom_ops_library(str(library))
    for name, value in given.items():
        options.add_initializer(name, value)  # in place; `add_external_initializers` would copy
    with out_of_memory(path.name):
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def open_graph(path: Path) -> Any:
    """Opens any graph, with the tensors that it keeps in files beside it. Raises what onnxruntime
    does, and `OutOfMemory`."""
    if VERSION < "1.24":
        _check_places(path)
    with out_of_memory(path.name):
        return onnxruntime.InferenceSession(
            str(path), session_options(), providers=["CPUExecutionProvider"]
        )


def _check_places(path: Path) -> None:
    """The last onnxruntime for Python 3.10 reads tensors wherever a graph says that they are.

    Raises `ValueError` where that is not below the graph's folder, as later ones do.
    """
    import onnx
    from onnx.external_data_helper import (
        ExternalDataInfo,
        _get_all_tensors,
        uses_external_data,
    )

    folder = path.parent.resolve()
    for tensor in _get_all_tensors(onnx.load_model(path, load_external_data=False)):
        if uses_external_data(tensor):
            place = ExternalDataInfo(tensor).location
            if not (folder / place).resolve().is_relative_to(folder):
                raise ValueError(f"{place} of {tensor.name} is outside of the model's folder")


def run_blank(session: Any) -> None:
    """One step on zeros, a row of one token; every dimension that is not fixed is 1."""
    types = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int8)": np.int8}
    given: dict[str, Any] = {}
    for entry in session.get_inputs():
        shape = [size if isinstance(size, int) else 1 for size in entry.shape]
        given[entry.name] = np.zeros(shape, types[entry.type])
    given["total"] += 1
    session.run(["logits"], given)


def run_options() -> Any:
    """Of one run; setting `terminate` ends it."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = FATAL_ONLY
    return options


def pack(graph: bytes, tensors: dict[str, Any], path: Path) -> Path:
    """Writes the optimized graph to `path`; returns the file of its weights beside it.

    That file holds each tensor twice: as given, and in the layout that this CPU's kernels want, so
    that opening it neither computes nor copies. `tensors` are the graph's external initializers.
    """
    options = session_options()
    weights = path.with_suffix(".bin")
    options.optimized_model_filepath = str(path)
    for key, value in {
        "optimized_model_external_initializers_file_name": weights.name,
        "optimized_model_external_initializers_min_size_in_bytes": "1",
        "save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(f"session.{key}", value)
    _open_given(graph, tensors, options)
    return weights


def open_given(graph: bytes, tensors: dict[str, Any]) -> Any:
    """Opens a graph for a run or two: its external initializers, `tensors`, are not packed."""
    options = session_options()
    options.add_session_config_entry("session.disable_prepacking", "1")
    return _open_given(graph, tensors, options)


def _open_given(graph: bytes, tensors: dict[str, Any], options: Any) -> Any:
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(tensor) for tensor in tensors.values()]
    options.add_external_initializers(list(tensors), values)
    with out_of_memory("the model"):
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """Turns onnxruntime's allocation failures into `OutOfMemory`."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"there is no memory for {what}") from error
    except (ort_errors.RuntimeException, ort_errors.Fail, RuntimeError) as error:
        if not is_out_of_memory(str(error)):
            raise
        raise OutOfMemory(f"there is no memory for {what}") from error
