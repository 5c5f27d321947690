"""The C library behind `engine.native`, called by ctypes; pass.h documents its functions.

A call releases the interpreter's lock. Only one thread may call `run_pass`.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int32, c_size_t
from ctypes import c_void_p as Pointer
from pathlib import Path
from typing import Any

from common.cpus import cpu_count
from common.errors import EngineError, InvalidRequest, OutOfMemory
from engine.artifacts.config import GPT2Config

LINE = 16  # rows and vectors are padded to multiples of so many numbers
PAGE_TOKENS = 16  # tokens of a K/V page
MAX_RANK = 1 << 16  # of a change
PRODUCTS = ("qkv", "attention_out", "ffn_hidden", "ffn_out")  # a layer's products
# The library is built and named like a Python extension, but opened as a plain library.
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
LIBRARY = Path(__file__).with_name("_pass" + SUFFIX)


class Matrix(Structure):
    _fields_ = (("weight", Pointer), ("bias", Pointer))


class Norm(Structure):
    _fields_ = (("gamma", Pointer), ("beta", Pointer))


class Layer(Structure):
    _fields_ = (
        ("attention_norm", Norm), ("qkv", Matrix), ("attention_out", Matrix), ("ffn_norm", Norm),
        ("ffn_hidden", Matrix), ("ffn_out", Matrix), ("attention_scale", c_float),
    )  # fmt: skip


class Model(Structure):
    _fields_ = (
        ("num_layers", c_int32), ("units", c_int32), ("heads", c_int32), ("hidden", c_int32),
        ("vocab", c_int32), ("max_length", c_int32), ("int8", c_int32), ("gelu_tanh", c_int32),
        ("epsilon", c_float), ("layers", POINTER(Layer)), ("final_norm", Norm),
        ("embedding", Pointer), ("positions", Pointer), ("head", Matrix),
    )  # fmt: skip


class Change(Structure):
    _fields_ = (
        ("down", Pointer), ("up", Pointer), ("down_bias", Pointer), ("rest", Pointer),
        ("bias", Pointer), ("rank", c_int32), ("bits", c_int32),
    )  # fmt: skip


class AdapterLayer(Structure):
    _fields_ = tuple((name, Change) for name in PRODUCTS)


class Adapter(Structure):
    _fields_ = (
        ("layers", POINTER(AdapterLayer)), ("embedding", Change), ("head", Change),
        ("more_embedding", Pointer), ("more_head", Pointer), ("more", c_int32),
        ("positions", Pointer), ("final_norm", Norm),
    )  # fmt: skip


class Piece(Structure):
    _fields_ = (
        ("ids", Pointer), ("pages", Pointer), ("count", c_int32), ("position", c_int32),
        ("num_logits", c_int32), ("adapter", Pointer), ("states", Pointer),
    )  # fmt: skip


class Mapping(Structure):
    _fields_ = (("next", Pointer), ("begin", Pointer), ("size", c_size_t), ("lost", c_int32))


class Truncation(Structure):
    _fields_ = (
        ("top_p", c_double), ("typical_p", c_double), ("temperature", c_float), ("min_p", c_float),
        ("top_k", c_size_t),
    )  # fmt: skip


try:
    _library = ctypes.CDLL(str(LIBRARY))
except OSError as error:
    raise EngineError(
        f"the engine's library does not load: {error}; in a checkout, ./scripts/serve compiles it"
    ) from None


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """Return the library's function of this name, with its types set."""
    function = getattr(_library, name)
    function.restype, function.argtypes = result, arguments
    return function


_size, _model = c_size_t, POINTER(Model)
_run_pass = _function("run_pass", c_int, _model, Pointer, POINTER(Piece), _size, Pointer)
_page_bytes = _function("page_bytes", _size, _model)
_use_threads = _function("use_threads", c_int, c_int)
_use_kernels = _function("use_kernels", c_char_p, c_char_p)
_take_times = _function("take_times", None, POINTER(c_double * 5))
release_scratch = _function("release_scratch", None)
guard = _function("guard", None, POINTER(Mapping))
end_guard = _function("end_guard", None, POINTER(Mapping))
packed_bytes = _function("packed_bytes", _size, _size, _size, c_int)
pack = _function("pack", None, Pointer, c_int, *[_size] * 4, c_int, Pointer)
rest_bytes = _function("rest_bytes", _size, _size, _size, c_int)
pack_rest = _function("pack_rest", None, Pointer, _size, _size, c_int, Pointer)
unpack_int8 = _function("unpack_int8", None, Pointer, _size, _size, Pointer)
rotate = _function("rotate", None, Pointer, _size, _size, _size)
add_products = _function("add_products", None, Pointer, Pointer, _size, _size, Pointer)
softmax_weights = _function("softmax_weights", c_double, Pointer, _size, c_float, Pointer)
largest_tokens = _function("largest_tokens", _size, Pointer, _size, _size, Pointer, Pointer)
draw_token = _function(
    "draw_token", c_int32, Pointer, _size, POINTER(Truncation), c_double, Pointer
)
allowed_logits = _function("allowed_logits", _size, Pointer, Pointer, _size, Pointer, Pointer)
allowed_argmax = _function("allowed_argmax", c_int32, Pointer, Pointer, _size)
only_allowed = _function("only_allowed", c_int32, Pointer, _size)
_STATUS = ("ok", "the model's sizes", "a piece's tokens or positions", "memory")


def page_bytes(config: GPT2Config, precision: str) -> int:
    """Return the bytes of a K/V page, in int8 or fp32: `PAGE_TOKENS` tokens of all layers."""
    sizes = Model(
        num_layers=config.num_layers,
        units=config.units,
        heads=config.num_heads,
        int8=precision == "int8",
    )
    return int(_page_bytes(byref(sizes)))


def use_kernels(name: str | None = None) -> str:
    """Use an instruction set, by default the best; returns its name. Raises `InvalidRequest`."""
    used: bytes | None = _use_kernels(None if name is None else name.encode())
    if used is None:
        raise InvalidRequest(f"this processor has no {name} instructions")
    return used.decode()


def use_threads(count: int) -> int:
    """Set the threads of a pass, including the calling one; returns how many started."""
    return int(_use_threads(count))


def start() -> None:
    """Choose the best kernels, and a thread for each processor, before the first pass."""
    use_kernels()
    use_threads(cpu_count())


def run_pass(
    model: Model, arena: int, pieces: ctypes.Array[Piece], count: int, logits: int
) -> None:
    """Compute pieces and write logits, both by address. Raises `OutOfMemory`, `InvalidRequest`."""
    check(_run_pass(byref(model), arena, pieces, count, logits))


def check(status: int) -> None:
    """Raise the error of a pass that returned `status`."""
    if status == 3:
        raise OutOfMemory("there is no memory for the arrays of a pass")
    if status:
        raise InvalidRequest(f"the pass was refused: {_STATUS[status]} are out of range")


def take_times() -> dict[str, float]:
    """Return the seconds that passes took since the last call, by part."""
    times = (c_double * 5)()
    _take_times(byref(times))
    return dict(zip(("embedding", "products", "attention", "rest", "head"), times, strict=True))
