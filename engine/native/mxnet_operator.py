"""The library's pass as an operator of MXNet's own, see operator.cc."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from engine.native import library

# Made by scripts/lib/mxnet_operator, in an image by scripts/lib/image_code.
mx.library.load(str(library.LIBRARY.with_name("_mxnet_operator" + library.SUFFIX)), verbose=False)

_status = np.zeros(1, np.int32)
_status_array = mx.nd.from_numpy(_status)
_pieces = (library.Piece * 64)()


def run_pass(
    model: library.Model, arena: int, pieces: ctypes.Array[library.Piece], count: int, logits: int
) -> None:
    """As `library.run_pass`. It costs some 30 us more: MXNet's own threads run its operators."""
    global _pieces
    if not count:
        return
    if count > len(_pieces):
        _pieces = (library.Piece * (2 * count))()
    # An array that is made anew costs as much as a call, so pieces always come in the same memory.
    address = ctypes.addressof(_pieces)
    ctypes.memmove(address, pieces, count * ctypes.sizeof(library.Piece))
    mx.nd.kogpt2_pass(
        _array(ctypes.addressof(model), ctypes.sizeof(model)),
        _array(address, count * ctypes.sizeof(library.Piece)),
        _array(arena),
        _array(logits),
        out=_status_array,
    )
    _status_array.wait_to_read()
    library.check(int(_status[0]))


@functools.lru_cache(1024)
def _array(address: int, size: int = 1) -> Any:
    """An array on memory that is there already.

    MXNet needs one of the arena and of the logits to order what it runs, whatever their length.
    """
    memory = (ctypes.c_uint8 * size).from_address(address)
    return mx.nd.from_numpy(np.ctypeslib.as_array(memory))
