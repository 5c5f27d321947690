"""Products of int8 weights in MXNet, of rows in memory that numpy sees as well.

A row of W has a scale of its own, and so has each row of x, with a zero point: with x = s q + m and
W = t p, of each row, x W^T + b is s t (q p^T) + m (t sum(p)) + b. oneDNN multiplies uint8 by int8
and adds up in int32, which is exact: a row's result does not depend, not in a bit, on the rows
beside it or on how a product is cut.

In shapes: M rows of x, K wide, N rows of W.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.mxnet_compat import CPU_WORKERS, mx

_LIB, check_call, c_str_array = mx.base._LIB, mx.base.check_call, mx.base.c_str_array
NDArrayHandle = mx.base.NDArrayHandle
POINTER_TO_HANDLE = ctypes.POINTER(NDArrayHandle)

nd = mx.nd
nd.ndarray.DLDataType.TYPE_MAP.setdefault("int8", (0, 8, 1))  # the one that `from_numpy` lacks

Floats = NDArray[np.float32]

SHARD_SIZE = 1 << 22  # of M N K multiplications; one core is as fast with fewer
TINY = np.float32(1e-30)


def shared(array: NDArray[Any]) -> Any:
    """The same memory as MXNet has it."""
    return nd.from_numpy(array[...])  # the array that it is given cannot be written any more


@functools.cache
def steps() -> int:
    """How many steps there are between the least and the largest number of a row of x. oneDNN adds
    two products up in 16 bits where the processor has no VNNI, and then x must have 7; found by
    trying."""
    x, w = np.full((2, 64), 255, np.uint8), np.full((2, 64), 127, np.int8)
    y = np.empty((2, 2), np.int32)
    out = shared(y)
    multiplication(2)([shared(x), shared(w), *_bounds()], [out, nd.empty(1), nd.empty(1)])
    out.wait_to_read()
    return 255 if (y == 64 * 255 * 127).all() else 127


class Operator:
    """One of MXNet's, with its parameters. To call it through MXNet's Python takes 20 us longer
    than this, a hundred times a step."""

    def __init__(self, name: str, **parameters: Any) -> None:
        self._handle = ctypes.c_void_p()
        check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(self._handle)))
        self._parameters = (
            ctypes.c_int(len(parameters)),
            c_str_array([*parameters]),
            c_str_array([str(value) for value in parameters.values()]),
        )
        self._storage = ctypes.POINTER(ctypes.c_int)()

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Begins; the outputs are to be waited for."""
        given, made = handles(inputs), ctypes.cast(handles(outputs), POINTER_TO_HANDLE)
        check_call(
            _LIB.MXImperativeInvokeEx(
                self._handle,
                ctypes.c_int(len(inputs)),
                given,
                ctypes.byref(ctypes.c_int(len(outputs))),
                ctypes.byref(made),
                *self._parameters,
                ctypes.byref(self._storage),
            )
        )


def handles(arrays: Sequence[Any]) -> Any:
    return (NDArrayHandle * len(arrays))(*[array.handle for array in arrays])


@functools.cache
def multiplication(length: int) -> Operator:
    """int32 (M, N) of uint8 (M, K), int8 (N, K) and four bounds."""
    name = "_contrib_quantized_fully_connected"
    return Operator(name, num_hidden=length, no_bias=True)


@functools.cache
def _bounds() -> tuple[Any, ...]:
    """What the operator would scale floats by, the least and the largest of x and of W."""
    return 2 * (nd.array([-1.0]), nd.array([1.0]))


class Scratch:
    """Memory for products of up to `rows` rows, one product at a time."""

    def __init__(self, rows: int, width: int, length: int) -> None:
        """`width` is the largest K, `length` the largest N."""
        self._x, self._y = np.empty(rows * width, np.uint8), np.empty(rows * length, np.int32)
        self._inputs: dict[tuple[int, int], tuple[NDArray[Any], Any]] = {}
        self._outputs: dict[tuple[int, int, int], tuple[NDArray[Any], list[Any]]] = {}

    def input(self, rows: int, width: int) -> tuple[NDArray[np.uint8], Any]:
        """(M, K) as numpy and as MXNet have it."""
        key = rows, width
        if key not in self._inputs:
            array = self._x[: rows * width].reshape(key)
            self._inputs[key] = array, shared(array)
        return self._inputs[key]

    def output(self, rows: int, begin: int, end: int) -> tuple[NDArray[np.int32], list[Any]]:
        """(M, end - begin), and the same with what else `multiplication` puts out."""
        key = rows, begin, end
        if key not in self._outputs:
            array = self._y[rows * begin : rows * end].reshape(rows, end - begin)
            self._outputs[key] = array, [shared(array), nd.empty(1), nd.empty(1)]
        return self._outputs[key]


class Product:
    """x W^T + b: its `weights` are `NAME.q` (N, K) int8, `NAME.scale` and `NAME.sum` (N,), see
    `engine.prepared.int8`, and `NAME.bias` (N,) if it has one."""

    def __init__(self, weights: Mapping[str, NDArray[Any]], name: str, scratch: Scratch) -> None:
        q = weights[f"{name}.q"]
        self._scale, self._sum = weights[f"{name}.scale"], weights[f"{name}.sum"]
        self._bias, self._scratch, self._size = weights.get(f"{name}.bias"), scratch, q.size
        self._whole = _cut(q, 1)
        self._shards = _cut(q, min(CPU_WORKERS, len(q)))

    def __call__(self, x: Floats, y: Floats | None = None) -> Floats:
        """(M, K) -> (M, N), in `y` if given."""
        q, given = self._scratch.input(*x.shape)
        low = x.min(axis=-1, keepdims=True)
        scale = x.max(axis=-1, keepdims=True)
        scale -= low
        scale /= np.float32(steps())
        scale += TINY  # for a row that is one number
        x = x - low
        x /= scale
        x += np.float32(0.5)
        np.copyto(q, x, casting="unsafe")  # rounds down
        made = []
        for cut, weight in self._shards if len(x) * self._size >= SHARD_SIZE else self._whole:
            array, out = self._scratch.output(len(x), cut.start, cut.stop)
            multiplication(cut.stop - cut.start)([given, weight, *_bounds()], out)
            made.append((cut, array, out[0]))
        y = np.multiply(low, self._sum, out=y)
        if self._bias is not None:
            y += self._bias
        for cut, array, out in made:
            out.wait_to_read()
            part = array.astype(np.float32)
            part *= self._scale[cut]
            part *= scale
            y[:, cut] += part
        return y


def _cut(q: NDArray[np.int8], count: int) -> list[tuple[slice, Any]]:
    edges = [i * len(q) // count for i in range(count + 1)]
    return [(slice(begin, end), shared(q[begin:end])) for begin, end in itertools.pairwise(edges)]
