"""Opens onnxruntime sessions that share one thread pool."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from common.cpus import cpu_count
from common.errors import OutOfMemory
from common.memory import is_out_of_memory

VERSION: str = onnxruntime.__version__
FATAL_ONLY = 4  # a log level; errors are raised, so they need no log line

# Without flash attention, a decode step of eight rows of 900 tokens takes a quarter less processor
# time, a step of short rows the same. onnxruntime reads this when a session is opened.
os.environ.setdefault("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")

_sharing = threading.Lock()


@functools.cache
def _share_threads() -> None:
    """Use one thread pool for all sessions: with a pool each, idle ones would spin on the cores."""
    onnxruntime.set_global_thread_pool_sizes(cpu_count(), 1)


def session_options() -> Any:
    """Return the options of every session: the shared thread pool, and no memory arena."""
    with _sharing:  # for concurrent first loads: no session may exist before the pool has its size
        _share_threads()
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = FATAL_ONLY
    # An arena would hold the peak memory of the longest prefill, and makes a step no faster.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Idle threads must not spin: sampling and other processes use the cores between steps. This
    # makes steps no slower.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def open_graph(path: Path) -> Any:
    """Open an ONNX graph with its external tensors.

    Raises onnxruntime's errors, `OutOfMemory`, and `ValueError` for tensors outside of its folder.
    """
    if tuple(map(int, VERSION.split(".")[:2])) < (1, 24):
        _check_places(path)
    with out_of_memory(path.name):
        return onnxruntime.InferenceSession(
            str(path), session_options(), providers=["CPUExecutionProvider"]
        )


def _check_places(path: Path) -> None:
    """Raise `ValueError` for external tensors outside of the graph's folder.

    The last onnxruntime for Python 3.10 does not check that; later versions do.
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


def run_options() -> Any:
    """Return the options of a run; setting their `terminate` to True ends the run."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = FATAL_ONLY
    return options


@contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """Turn onnxruntime's allocation failures into `OutOfMemory`."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"there is no memory for {what}") from error
    except (ort_errors.RuntimeException, ort_errors.Fail, RuntimeError) as error:
        if not is_out_of_memory(str(error)):
            raise
        raise OutOfMemory(f"there is no memory for {what}") from error
