"""The library's pass as an operator of MXNet, see operator.cc."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from engine.native import library

_LIB, check_call = mx.base._LIB, mx.base.check_call
# MXNet names its "subgraph backend" on stderr when it binds a symbol.
os.environ.setdefault("MXNET_SUBGRAPH_VERBOSE", "0")
# Made by scripts/mxnet_operator.
mx.library.load(str(library.LIBRARY.with_name("_mxnet_operator" + library.SUFFIX)), verbose=False)


class _Call(ctypes.Structure):
    _fields_ = (("pieces", ctypes.c_void_p), ("count", ctypes.c_size_t), ("status", ctypes.c_int32))


_call = _Call()


def run_pass(
    model: library.Model, arena: int, pieces: ctypes.Array[library.Piece], count: int, logits: int
) -> None:
    """Run a pass as `library.run_pass` does, but by MXNet's engine.

    This takes 0.1 ms more with MXNET_ENGINE_TYPE=NaiveEngine, and up to 0.3 ms more on MXNet's
    threads: each pass drives MXNet's code out of the processor's caches.
    """
    _call.pieces, _call.count = ctypes.addressof(pieces), count
    executor, output = _bind(ctypes.addressof(model), arena, logits)
    check_call(_LIB.MXExecutorForward(executor.handle, 0))  # executor.forward, without its arrays
    output.wait_to_read()
    library.check(_call.status)


@functools.lru_cache(256)
def _bind(model: int, arena: int, logits: int) -> tuple[Any, Any]:
    """Return the operator, bound to memory at these addresses, and its output.

    mx.nd.kogpt2_pass, which is not bound, takes three times as long. MXNet orders operations by the
    arrays of the arena and the logits, whatever their length.
    """
    arrays = {
        "model": _array(model, ctypes.sizeof(library.Model)),
        "call": _array(ctypes.addressof(_call), ctypes.sizeof(_Call)),
        "arena": _array(arena, 1),
        "logits": _array(logits, 1),
    }
    symbol = mx.sym.kogpt2_pass(*map(mx.sym.var, arrays))
    written = {name: arrays.pop(name) for name in symbol.list_auxiliary_states()}
    executor = symbol.bind(mx.cpu(), arrays, aux_states=written, grad_req="null")
    return executor, executor.outputs[0]


def _array(address: int, size: int) -> Any:
    memory = (ctypes.c_uint8 * size).from_address(address)
    return mx.nd.from_numpy(np.ctypeslib.as_array(memory))
